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

/** Lines of functions as a tree; a parent's index is less than its child's, a root's is -1. */
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
  node: Uint32Array;
  state: Uint8Array;
  count: Float64Array;
}

export interface Data {
  document: Document;
  lines: Lines;
  samples: Samples;
}

export async function load(base64: string): Promise<Data> {
  const bytes = await unpack(base64);
  performance.mark("unpacked");
  return decode(bytes);
}

export async function unpack(base64: string): Promise<Uint8Array> {
  const packed = fromBase64(base64.trim());
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  // Newer browsers, three times as fast.
  if ("fromBase64" in Uint8Array) return (Uint8Array as unknown as { fromBase64(text: string): Uint8Array<ArrayBuffer> }).fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

function decode(bytes: Uint8Array): Data {
  let at = 0;
  const get = (): number => {
    let byte = bytes[at++]!;
    if (byte < 128) return byte;
    let value = byte & 127, unit = 128;
    do {
      byte = bytes[at++]!;
      value += (byte & 127) * unit;
      unit *= 128;
    } while (byte > 127);
    return value;
  };
  const length = get();
  const document = JSON.parse(new TextDecoder().decode(bytes.subarray(at, at + length))) as Document;
  if (document.version !== 1) throw new Error(`data of version ${document.version}`);
  at += length;
  const nodes = get();
  const lines: Lines = { parent: new Int32Array(nodes), func: new Uint32Array(nodes), line: new Uint32Array(nodes), position: new Uint32Array(nodes) };
  for (let i = 0; i < nodes; i++) {
    const up = get();
    lines.parent[i] = up === 0 ? -1 : i - up;
    lines.func[i] = get();
    lines.line[i] = get();
    if (document.positions) lines.position[i] = get();
  }
  // No entry takes less than two bytes, no group less than three more.
  const most = (bytes.length - at) >> 1;
  const node = new Uint32Array(most), state = new Uint8Array(most), count = new Float64Array(most);
  const thread: number[] = [], bucket: number[] = [], start: number[] = [];
  let entries = 0;
  for (let group = get(); group > 0; group = get()) {
    thread.push(get());
    bucket.push(get());
    start.push(entries);
    for (let last = 0; group > 0; group--, entries++) {
      last += get();
      const both = get();
      node[entries] = last;
      state[entries] = both % 4;
      count[entries] = Math.floor(both / 4) + 1;
    }
  }
  start.push(entries);
  const samples: Samples = {
    thread: Uint32Array.from(thread), bucket: Uint32Array.from(bucket), start: Uint32Array.from(start),
    node: node.subarray(0, entries), state: state.subarray(0, entries), count: count.subarray(0, entries),
  };
  return { document, lines, samples };
}
