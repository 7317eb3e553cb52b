// The block of data, as tachyon/src/sinks/page/data.rs writes it.

export const PYTHON = 0, NATIVE = 1, KERNEL = 2, SPECIAL = 3;
export const RAN = 0, HELD = 1, NOT_HELD = 2, WAITED = 3;

export interface Document {
  version: number;
  tool: string;
  host: string;
  start_unix: number;
  seconds: number;
  interval_us: number;
  bucket_us: number;
  buckets: number;
  strings: string[];
  functions: { kind: number[]; name: number[]; file: number[]; place: number[]; module: number[] };
  /** Columns within lines, where nodes tell them apart: the first, and the one past the last (-1: the line's end). */
  positions?: [number, number][];
  /** Where source text was asked for. */
  source?: {
    files: { file: number; changed: boolean; lines: [number, string][] }[];
    missing: { file: number; why: string }[];
  };
  processes: { name: string; pid: number; python: string; labels: Record<string, string> }[];
  threads: { name: string; process: number }[];
  quality: {
    rate_hz: number;
    event: string;
    cut: boolean;
    loss: Record<string, number>;
    not_fired: number | null;
    inconsistent: number;
    stops: Record<string, number>;
    merges: Record<string, number>;
    notes: string[];
    refused: string[];
  };
}

/** Lines of functions as a tree, in preorder: a node is followed by all that is below it. A root's parent is -1. */
export interface Lines {
  parent: Int32Array;
  func: Uint32Array;
  line: Uint32Array;
  /** Index into the document's positions; 0: not known. */
  position: Uint32Array;
}

/** Samples: a group is a thread in a piece of time, with the entries from `start[group]` to `start[group + 1]`. */
export interface Samples {
  thread: Uint32Array;
  bucket: Uint32Array;
  start: Uint32Array;
  /** Index into the stacks. */
  stack: Uint32Array;
  state: Uint8Array;
  count: Float64Array;
}

export interface Data {
  document: Document;
  lines: Lines;
  /** Nodes that stacks end in, in their order. */
  stacks: Uint32Array;
  samples: Samples;
}

export async function load(base64: string): Promise<Data> {
  const bytes = await unpack(base64);
  performance.mark("unpacked");
  return decode(bytes);
}

export async function unpack(base64: string): Promise<Uint8Array> {
  const packed = fromBase64(base64.trim());
  const stream = new DecompressionStream("gzip"), writer = stream.writable.getWriter();
  // A Blob's stream would send the bytes to the browser's process and back.
  const written = writer.write(packed).then(() => writer.close());
  const [bytes] = await Promise.all([new Response(stream.readable).arrayBuffer(), written]);
  return new Uint8Array(bytes);
}

function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  // Newer browsers, three times as fast.
  if ("fromBase64" in Uint8Array) return (Uint8Array as unknown as { fromBase64(text: string): Uint8Array<ArrayBuffer> }).fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Reads numbers of seven bits a byte, the low ones first. */
class Numbers {
  at = 0;

  constructor(readonly bytes: Uint8Array) {}

  get(): number {
    const byte = this.bytes[this.at++]!;
    return byte < 128 ? byte : this.long(byte & 127);
  }

  private long(value: number): number {
    for (let unit = 128; ; unit *= 128) {
      const byte = this.bytes[this.at++]!;
      value += (byte & 127) * unit;
      if (byte < 128) return value;
    }
  }
}

function decode(bytes: Uint8Array): Data {
  const numbers = new Numbers(bytes);
  const length = numbers.get();
  const document = JSON.parse(new TextDecoder().decode(bytes.subarray(numbers.at, numbers.at + length))) as Document;
  if (document.version !== 2) throw new Error(`data of version ${document.version}`);
  numbers.at += length;
  const nodes = numbers.get(), hasPositions = document.positions !== undefined;
  const lines: Lines = { parent: new Int32Array(nodes), func: new Uint32Array(nodes), line: new Uint32Array(nodes), position: new Uint32Array(nodes) };
  for (let i = 0; i < nodes; i++) {
    const up = numbers.get();
    lines.parent[i] = up === 0 ? -1 : i - up;
    lines.func[i] = numbers.get();
    lines.line[i] = numbers.get();
    if (hasPositions) lines.position[i] = numbers.get();
  }
  const stacks = new Uint32Array(numbers.get());
  for (let i = 0, last = 0; i < stacks.length; i++) stacks[i] = last += numbers.get();
  // No entry takes less than two bytes, no group less than three more.
  const most = (bytes.length - numbers.at) >> 1;
  const stack = new Uint32Array(most), state = new Uint8Array(most), count = new Float64Array(most);
  const thread: number[] = [], bucket: number[] = [], start: number[] = [];
  let entries = 0;
  for (let group = numbers.get(); group > 0; group = numbers.get()) {
    thread.push(numbers.get());
    bucket.push(numbers.get());
    start.push(entries);
    for (let last = 0; group > 0; group--, entries++) {
      last += numbers.get();
      const both = numbers.get();
      stack[entries] = last;
      state[entries] = both % 4;
      count[entries] = Math.floor(both / 4) + 1;
    }
  }
  start.push(entries);
  const samples: Samples = {
    thread: Uint32Array.from(thread), bucket: Uint32Array.from(bucket), start: Uint32Array.from(start),
    stack: stack.subarray(0, entries), state: state.subarray(0, entries), count: count.subarray(0, entries),
  };
  return { document, lines, stacks, samples };
}
