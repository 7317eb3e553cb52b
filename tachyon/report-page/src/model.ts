// What the views show of the samples that the filters let through. All sums are samples.

import { type Data, type Lines, KERNEL, NATIVE, SPECIAL } from "./data";

/** Functions as a tree: lines are not told apart, and native code is folded into its caller where that is wanted. */
export interface Tree {
  parent: Int32Array;
  func: Uint32Array;
  /** By line: its node. */
  of: Int32Array;
  firstChild: Int32Array;
  nextSibling: Int32Array;
  roots: number;
}

export interface Filter {
  process: number | null;
  thread: number | null;
  module: number | null;
  /** Pieces of time: the first, and the one past the last. */
  range: [number, number] | null;
}

/** Sums of one filter. */
export interface Sums {
  samples: number;
  /** By line. */
  own: Float64Array;
  total: Float64Array;
  /** By state and piece of time, whatever the range. */
  times: Float64Array[];
  states: number[];
}

export interface Row { func: number; own: number; total: number }
export interface Edge { func: number; samples: number }
export interface LineRow { line: number; own: number; total: number; marks: Mark[] }
/** A part of a line: an expression that was running. */
export interface Mark { from: number; to: number; own: number; total: number }

export class Model {
  readonly names: string[];
  /** By line: whether no caller of it is the same function. */
  private readonly outermost: Uint8Array;
  /** A stack without Python is charged to this function. */
  readonly noPython: number;
  /** What the graph shows: where Python begins its stack, without the native code that started it. */
  readonly shown: Tree;
  private foldedTree: Tree | null = null;
  private all: number | null = null;
  /** By line: the line that its samples are charged to; -1 where nothing around it is Python. */
  private readonly charged: Int32Array;

  constructor(readonly data: Data) {
    const { functions, strings } = data.document;
    this.noPython = functions.name.length;
    functions.kind.push(SPECIAL);
    functions.name.push(strings.push("<no Python frame>") - 1);
    functions.file.push(strings.push("") - 1);
    functions.place.push(functions.file[this.noPython]!);
    functions.module.push(functions.name[this.noPython]!);
    this.names = functions.name.map((_, func) => this.label(func));
    this.shown = this.tree(true);
    const { parent, func } = data.lines;
    this.outermost = outermost(parent, func, this.names.length);
    this.charged = new Int32Array(parent.length);
    for (let i = 0; i < parent.length; i++)
      this.charged[i] = !this.isMachine(func[i]!) ? i : parent[i]! < 0 ? -1 : this.charged[parent[i]!]!;
  }

  get folded(): Tree {
    return (this.foldedTree ??= this.tree(false));
  }

  kind(func: number): number { return this.data.document.functions.kind[func]!; }
  isMachine(func: number): boolean { const kind = this.kind(func); return kind === NATIVE || kind === KERNEL; }
  text(index: number): string { return this.data.document.strings[index]!; }
  name(func: number): string { return this.text(this.data.document.functions.name[func]!); }
  file(func: number): string { return this.text(this.data.document.functions.file[func]!); }
  module(func: number): number { return this.data.document.functions.module[func]!; }

  private label(func: number): string {
    const name = this.name(func), place = this.text(this.data.document.functions.place[func]!);
    if (this.kind(func) === KERNEL) return `[k] ${name}`;
    return place ? `${name} (${place})` : name;
  }

  /** `native`: whether native code has nodes of its own. */
  private tree(native: boolean): Tree {
    const { parent, func } = this.data.lines;
    const of = new Int32Array(parent.length);
    const parents: number[] = [], funcs: number[] = [];
    // By line: whether it and all its callers are native.
    const outer = new Uint8Array(parent.length);
    const table = new PairTable(parent.length);
    const node = (above: number, what: number) => table.id(above + 1, what, () => {
      parents.push(above);
      funcs.push(what);
    });
    for (let i = 0; i < parent.length; i++) {
      const isMachine = this.isMachine(func[i]!), isFirst = parent[i]! < 0 || outer[parent[i]!] === 1;
      outer[i] = isMachine && isFirst ? 1 : 0;
      const above = parent[i]! < 0 || (native && isFirst && !isMachine) ? -1 : of[parent[i]!]!;
      of[i] = !native && isMachine ? above : node(above, func[i]!);
    }
    if (of.includes(-1)) {
      const none = node(-1, this.noPython);
      for (let i = 0; i < of.length; i++) if (of[i] === -1) of[i] = none;
    }
    const own = Int32Array.from(parents);
    return { parent: own, func: Uint32Array.from(funcs), of, ...links(own) };
  }

  /** By line: whether it or one of its callers is of the module. */
  private inModule(module: number): Uint8Array {
    const { parent, func } = this.data.lines;
    return below(parent, (i) => this.module(func[i]!) === module);
  }

  /** `only`: of threads. */
  sums(filter: Filter, only?: (thread: number) => boolean): Sums {
    const { document, samples, lines } = this.data;
    const own = new Float64Array(lines.parent.length);
    const times = [0, 1, 2, 3].map(() => new Float64Array(document.buckets));
    const states = [0, 0, 0, 0];
    const flags = filter.module === null ? null : this.inModule(filter.module);
    const [from, to] = filter.range ?? [0, Infinity];
    let total = 0;
    const { thread, bucket, start, node, state, count } = samples;
    for (let group = 0; group < thread.length; group++) {
      const of = thread[group]!, at = bucket[group]!;
      if (only && !only(of)) continue;
      if (filter.thread !== null && of !== filter.thread) continue;
      if (filter.process !== null && document.threads[of]!.process !== filter.process) continue;
      const inside = at >= from && at < to;
      for (let i = start[group]!, end = start[group + 1]!; i < end; i++) {
        const line = node[i]!, many = count[i]!;
        if (flags && !flags[line]) continue;
        times[state[i]!]![at]! += many;
        if (!inside) continue;
        own[line]! += many;
        states[state[i]!]! += many;
        total += many;
      }
    }
    return { samples: total, own, total: totals(lines.parent, own), times, states };
  }

  /** Own and total by node of a tree. */
  nodes(tree: Tree, sums: Sums): { own: Float64Array; total: Float64Array } {
    const own = new Float64Array(tree.parent.length);
    for (let i = 0; i < sums.own.length; i++) own[tree.of[i]!]! += sums.own[i]!;
    return { own, total: totals(tree.parent, own) };
  }

  /** The rows of functions, as `tachyon-bpf report` has them: native code is charged to its Python caller. */
  rows(sums: Sums, native: boolean): Row[] {
    const { func } = this.data.lines;
    const count = this.names.length;
    const own = new Float64Array(count), total = new Float64Array(count);
    for (let i = 0; i < func.length; i++) {
      const many = sums.own[i]!;
      if (many === 0) continue;
      const line = this.charged[i]!;
      own[line < 0 ? this.noPython : func[line]!]! += many;
      if (native && this.isMachine(func[i]!)) own[func[i]!]! += many;
    }
    const all = sums.total;
    for (let i = 0; i < all.length; i++) if (this.outermost[i]) total[func[i]!]! += all[i]!;
    total[this.noPython] = own[this.noPython]!;
    const rows: Row[] = [];
    for (let i = 0; i < count; i++)
      if (total[i]! > 0 && (native || !this.isMachine(i))) rows.push({ func: i, own: own[i]!, total: total[i]! });
    return rows;
  }

  /** Who calls a function, and whom it calls; a stack counts once, however often the call is in it. */
  edges(tree: Tree, total: Float64Array, wanted: number): { callers: Edge[]; callees: Edge[] } {
    const sides = [new Map<number, number>(), new Map<number, number>()];
    for (let i = 0; i < total.length; i++) {
      const above = tree.parent[i]!;
      if (total[i] === 0 || above < 0) continue;
      const callee = tree.func[i]!, caller = tree.func[above]!;
      if (callee === caller || (callee !== wanted && caller !== wanted)) continue;
      let again = false;
      for (let at = above; !again && tree.parent[at]! >= 0; at = tree.parent[at]!)
        again = tree.func[at] === callee && tree.func[tree.parent[at]!] === caller;
      if (again) continue;
      const [side, other] = callee === wanted ? [sides[0]!, caller] : [sides[1]!, callee];
      side.set(other, (side.get(other) ?? 0) + total[i]!);
    }
    const [callers, callees] = sides.map((side) =>
      [...side].map(([func, samples]) => ({ func, samples })).sort((a, b) => b.samples - a.samples || a.func - b.func));
    return { callers: callers!, callees: callees! };
  }

  /** The lines of a function. */
  lines(sums: Sums, wanted: number): LineRow[] {
    const { parent, func, line, position } = this.data.lines;
    const { positions } = this.data.document;
    const all = sums.total;
    const rows = new Map<number, LineRow>();
    const row = (number: number) => {
      let found = rows.get(number);
      if (!found) rows.set(number, (found = { line: number, own: 0, total: 0, marks: [] }));
      return found;
    };
    const marks = new Map<string, Mark>();
    const mark = (at: number): Mark | undefined => {
      if (!positions || position[at] === 0) return undefined;
      const key = `${line[at]} ${position[at]}`;
      let found = marks.get(key);
      if (!found) {
        const [from, to] = positions[position[at]!]!;
        marks.set(key, (found = { from, to, own: 0, total: 0 }));
        row(line[at]!).marks.push(found);
      }
      return found;
    };
    for (let i = 0; i < parent.length; i++) {
      if (all[i] === 0) continue;
      const charged = this.charged[i]!;
      const holder = this.isMachine(wanted) ? i : charged;
      if (sums.own[i]! > 0 && holder >= 0 && func[holder] === wanted) {
        row(line[holder]!).own += sums.own[i]!;
        const part = mark(holder);
        if (part) part.own += sums.own[i]!;
      }
      if (func[i] !== wanted) continue;
      let again = false;
      for (let at = parent[i]!; !again && at >= 0; at = parent[at]!) again = func[at] === wanted && line[at] === line[i];
      if (!again) row(line[i]!).total += all[i]!;
      const part = mark(i);
      if (!part) continue;
      again = false;
      for (let at = parent[i]!; !again && at >= 0; at = parent[at]!)
        again = func[at] === wanted && line[at] === line[i] && position[at] === position[i];
      if (!again) part.total += all[i]!;
    }
    return [...rows.values()].sort((a, b) => a.line - b.line);
  }

  /** Samples by thread and piece of time, for these threads. */
  lanes(threads: number[]): Map<number, { count: Float64Array; held: number; known: number; total: number }> {
    const { document, samples } = this.data;
    const lanes = new Map(threads.map((thread) =>
      [thread, { count: new Float64Array(document.buckets), held: 0, known: 0, total: 0 }]));
    for (let group = 0; group < samples.thread.length; group++) {
      const lane = lanes.get(samples.thread[group]!);
      if (!lane) continue;
      for (let i = samples.start[group]!; i < samples.start[group + 1]!; i++) {
        const many = samples.count[i]!, state = samples.state[i]!;
        lane.total += many;
        lane.held += state === 1 ? many : 0;
        lane.known += state === 0 ? 0 : many;
        if (state !== 3) lane.count[samples.bucket[group]!]! += many;
      }
    }
    return lanes;
  }

  /** All samples. */
  get samples(): number {
    return (this.all ??= this.data.samples.count.reduce((a, b) => a + b, 0));
  }

  /** Samples by thread. */
  byThread(): Float64Array {
    const { document, samples } = this.data;
    const by = new Float64Array(document.threads.length);
    for (let group = 0; group < samples.thread.length; group++)
      for (let i = samples.start[group]!; i < samples.start[group + 1]!; i++) by[samples.thread[group]!]! += samples.count[i]!;
    return by;
  }

  /** Samples whose stack has one of the functions in it. */
  matching(sums: Sums, found: Uint8Array): number {
    const { parent, func } = this.data.lines;
    const flags = below(parent, (i) => found[func[i]!] === 1);
    let samples = 0;
    for (let i = 0; i < flags.length; i++) if (flags[i]) samples += sums.own[i]!;
    return samples;
  }
}

function below(parent: Lines["parent"], found: (line: number) => boolean): Uint8Array {
  const flags = new Uint8Array(parent.length);
  for (let i = 0; i < flags.length; i++) flags[i] = (parent[i]! >= 0 && flags[parent[i]!]) || found(i) ? 1 : 0;
  return flags;
}

function totals(parent: Int32Array, own: Float64Array): Float64Array {
  const total = Float64Array.from(own);
  for (let i = total.length - 1; i >= 0; i--) if (parent[i]! >= 0) total[parent[i]!]! += total[i]!;
  return total;
}

/** The first child of each node, the next one of its parent, and the first root. */
function links(parent: Int32Array): { firstChild: Int32Array; nextSibling: Int32Array; roots: number } {
  const firstChild = new Int32Array(parent.length).fill(-1), nextSibling = new Int32Array(parent.length).fill(-1);
  let roots = -1;
  for (let i = parent.length - 1; i >= 0; i--) {
    const above = parent[i]!;
    if (above < 0) {
      nextSibling[i] = roots;
      roots = i;
    } else {
      nextSibling[i] = firstChild[above]!;
      firstChild[above] = i;
    }
  }
  return { firstChild, nextSibling, roots };
}

function outermost(parent: Int32Array, func: Uint32Array, functions: number): Uint8Array {
  const { firstChild, nextSibling, roots } = links(parent);
  const first = new Uint8Array(parent.length), open = new Uint32Array(functions);
  for (let at = roots; at >= 0;) {
    first[at] = open[func[at]!]! === 0 ? 1 : 0;
    open[func[at]!]!++;
    if (firstChild[at]! >= 0) {
      at = firstChild[at]!;
      continue;
    }
    while (at >= 0 && nextSibling[at]! < 0) {
      open[func[at]!]!--;
      at = parent[at]!;
    }
    if (at >= 0) {
      open[func[at]!]!--;
      at = nextSibling[at]!;
    }
  }
  return first;
}

/** Numbers for pairs of numbers, in order of first use: a Map takes five times as long. */
class PairTable {
  private readonly mask: number;
  private readonly first: Uint32Array;
  private readonly second: Uint32Array;
  private readonly ids: Int32Array;
  private used = 0;

  constructor(most: number) {
    let size = 16;
    while (size < 2 * (most + 1)) size *= 2;
    this.mask = size - 1;
    this.first = new Uint32Array(size);
    this.second = new Uint32Array(size);
    this.ids = new Int32Array(size).fill(-1);
  }

  id(first: number, second: number, added: () => void): number {
    let slot = (Math.imul(first, 0x9e3779b1) ^ Math.imul(second, 0x85ebca6b)) >>> 0;
    slot = (slot ^ (slot >>> 15)) & this.mask;
    while (this.ids[slot]! >= 0) {
      if (this.first[slot] === first && this.second[slot] === second) return this.ids[slot]!;
      slot = (slot + 1) & this.mask;
    }
    this.first[slot] = first;
    this.second[slot] = second;
    this.ids[slot] = this.used++;
    added();
    return this.ids[slot]!;
  }
}
