// Two profiles as one: what ran before and after a change.

import type { Data, Document, Lines } from "./data";
import type { Edge, Filter, Model, Sums } from "./model";
import { type Calls, preorder, Weighed } from "./tree";

/** A row of `diff --json`. */
export interface Change {
  function: string;
  file: string | null;
  line: number | null;
  kind: string;
  before: number;
  after: number;
  change: number;
  low: number | null;
  high: number | null;
  q: number | null;
  significant: boolean;
  only_moved: boolean;
  moved_to: string | null;
}

interface Whole { samples: number; seconds: number; sampled_seconds: number; replicates: number }

/** `diff --json`. */
export interface Changes {
  before: Whole;
  after: Whole;
  smallest_visible_share: number | null;
  by: string;
  per_unit: [number, number] | null;
  level: number;
  changes: Change[];
  /** Files of before that have another path after. */
  moved_files: Record<string, string>;
}

export interface Difference {
  changes: Changes;
  /** Quality of each side. */
  quality: [Document["quality"], Document["quality"]];
  /** By thread: 0 before, 1 after. */
  side: Uint8Array;
}

/** Samples, and by how much their share grew. */
export interface Weights { samples: Weighed; grown: Weighed | null }

/** By file: how it is shown, and its module. */
function placesAfter({ functions, strings }: Document): Map<string, [string, string]> {
  return new Map(functions.file.map((file, index) => [strings[file]!, [strings[functions.place[index]!]!, strings[functions.module[index]!]!]]));
}

/** Lines in preorder. `nodes` are some of them, which get their new numbers. */
function sorted({ parent, func }: { parent: Int32Array; func: Uint32Array }, nodes: number[]): Lines {
  const order = preorder(parent), placed = new Int32Array(parent.length);
  order.forEach((old, now) => { placed[old] = now; });
  nodes.forEach((old, place) => { nodes[place] = placed[old]!; });
  return {
    parent: Int32Array.from(order, (old) => (parent[old]! < 0 ? -1 : placed[parent[old]!]!)), func: Uint32Array.from(order, (old) => func[old]!),
    line: new Uint32Array(parent.length), position: new Uint32Array(parent.length),
  };
}

export function join(before: Data, after: Data, changes: Changes): { data: Data; difference: Difference } {
  const paths = changes.moved_files;
  const strings: string[] = [], known = new Map<string, number>();
  const string = (text: string) => {
    let id = known.get(text);
    if (id === undefined) known.set(text, (id = strings.push(text) - 1));
    return id;
  };
  const functions: Document["functions"] = { kind: [], name: [], file: [], place: [], module: [] };
  const ids = new Map<string, number>(), nodes = new Map<string, number>();
  const parent: number[] = [], func: number[] = [];
  const thread: number[] = [], bucket: number[] = [], start: number[] = [];
  const node: number[] = [], state: number[] = [], count: number[] = [];
  const document: Document = { ...after.document, strings, functions, processes: [], threads: [] };
  delete document.positions;
  const side: number[] = [];
  [before, after].forEach((data, which) => {
    const told = data.document, text = (index: number) => string(told.strings[index]!);
    const places = which === 0 ? placesAfter(after.document) : new Map<string, [string, string]>();
    const own = told.functions.name.map((_, index) => {
      const path = told.strings[told.functions.file[index]!]!, now = which === 0 && Object.hasOwn(paths, path) ? paths[path] : undefined;
      const [kind, name, file] = [told.functions.kind[index]!, text(told.functions.name[index]!), string(now ?? path)];
      const [place, module] = places.get(now ?? "") ?? [told.strings[told.functions.place[index]!]!, told.strings[told.functions.module[index]!]!];
      const key = `${kind} ${name} ${file}`;
      let id = ids.get(key);
      if (id === undefined) {
        ids.set(key, (id = functions.name.length));
        functions.kind.push(kind);
        functions.name.push(name);
        functions.file.push(file);
        functions.place.push(string(place));
        functions.module.push(string(module));
      }
      return id;
    });
    // Lines move when a program is changed: they are no part of what is compared.
    const moved = new Int32Array(data.lines.parent.length);
    for (let i = 0; i < moved.length; i++) {
      const above = data.lines.parent[i]! < 0 ? -1 : moved[data.lines.parent[i]!]!;
      const what = own[data.lines.func[i]!]!, key = `${above} ${what}`;
      let id = nodes.get(key);
      if (id === undefined) {
        nodes.set(key, (id = parent.length));
        parent.push(above);
        func.push(what);
      }
      moved[i] = id;
    }
    const threads = document.threads.length, processes = document.processes.length;
    for (const process of told.processes) document.processes.push(process);
    for (const { name, process } of told.threads) {
      document.threads.push({ name, process: process + processes });
      side.push(which);
    }
    document.buckets = Math.max(document.buckets, told.buckets);
    const { samples } = data;
    for (let group = 0; group < samples.thread.length; group++) {
      thread.push(samples.thread[group]! + threads);
      bucket.push(samples.bucket[group]!);
      start.push(node.length);
      for (let i = samples.start[group]!; i < samples.start[group + 1]!; i++) {
        node.push(moved[data.stacks[samples.stack[i]!]!]!);
        state.push(samples.state[i]!);
        count.push(samples.count[i]!);
      }
    }
  });
  start.push(node.length);
  const lines = sorted({ parent: Int32Array.from(parent), func: Uint32Array.from(func) }, node);
  const stacks = Uint32Array.from(new Set(node)).sort();
  const stackOf = new Int32Array(parent.length);
  stacks.forEach((leaf, stack) => { stackOf[leaf] = stack; });
  return {
    data: {
      document, lines, stacks,
      samples: {
        thread: Uint32Array.from(thread), bucket: Uint32Array.from(bucket), start: Uint32Array.from(start),
        stack: Uint32Array.from(node, (leaf) => stackOf[leaf]!), state: Uint8Array.from(state), count: Float64Array.from(count),
      },
    },
    difference: { changes, quality: [before.document.quality, after.document.quality], side: Uint8Array.from(side) },
  };
}

/** Each side by itself. */
export function sides(model: Model, filter: Filter, { side }: Difference): [Sums, Sums] {
  return [model.sums(filter, (thread) => side[thread] === 0), model.sums(filter, (thread) => side[thread] === 1)];
}

/** The mean of both sides' shares, as samples of both: what ran on one side only can be seen, too. */
export function weigh(model: Model, [before, after]: [Sums, Sums]): Weights {
  const all = before.samples + after.samples;
  const share = (part: number, sums: Sums) => part / Math.max(1, sums.samples);
  // One side alone is the whole.
  const halves = before.samples > 0 && after.samples > 0 ? 2 : 1;
  return {
    samples: new Weighed(model.tree, before.own.map((part, i) => ((share(part, before) + share(after.own[i]!, after)) / halves) * all)),
    grown: new Weighed(model.tree, before.own.map((part, i) => share(after.own[i]!, after) - share(part, before))),
  };
}

/** A caller or callee before and after, as shares of each side's samples. */
export interface ChangedEdge { func: number; before: number; after: number }

/** Callers and callees of a function on both sides, the largest change first. */
export function changedEdges(model: Model, calls: Calls, sides: [Sums, Sums], func: number): { callers: ChangedEdge[]; callees: ChangedEdge[] } {
  const [before, after] = sides.map((sums) => model.edges(calls, sums, func));
  const joined = (old: Edge[], now: Edge[]): ChangedEdge[] => {
    const edges = new Map<number, ChangedEdge>();
    const edge = (func: number) => {
      let found = edges.get(func);
      if (!found) edges.set(func, (found = { func, before: 0, after: 0 }));
      return found;
    };
    for (const { func, samples } of old) edge(func).before = samples / Math.max(1, sides[0].samples);
    for (const { func, samples } of now) edge(func).after = samples / Math.max(1, sides[1].samples);
    const change = ({ before, after }: ChangedEdge) => Math.abs(after - before);
    return [...edges.values()].sort((a, b) => change(b) - change(a) || a.func - b.func);
  };
  return { callers: joined(before!.callers, after!.callers), callees: joined(before!.callees, after!.callees) };
}
