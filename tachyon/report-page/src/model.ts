// What the views show of the samples that the filters let through. All sums are samples.

import { type Data, KERNEL, NATIVE, SPECIAL } from "./data";
import { isWait, STATE_COUNT, stateOfMark } from "./states";
import { below, links, outermost, PairTable, totals, type Tree } from "./tree";

export interface Filter {
  process: number | null;
  thread: number | null;
  /** A task's function: samples of it, and of what it awaits. */
  task: number | null;
  module: number | null;
  /** What threads did. */
  state: number | null;
  /** Pieces of time: the first, and the one past the last. */
  range: [number, number] | null;
}

export const EVERYTHING: Filter = { process: null, thread: null, task: null, module: null, state: null, range: null };

/** Sums of one filter. */
export interface Sums {
  samples: number;
  /** By line. */
  own: Float64Array;
  total: Float64Array;
  /** By line: those of its own that waited; `null`: none did. */
  waiting: Float64Array | null;
  /** By state and piece of time, whatever the range and the state. */
  times: Float64Array[];
  /** By state. */
  states: Float64Array;
}

export interface Row { func: number; own: number; total: number; waiting: number }
export interface Edge { func: number; samples: number }
/** A line that has samples. */
export interface LineRow { func: number; line: number; own: number; total: number; marks: Mark[] }
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
  private all: Sums | null = null;
  /** By function: the state that it says its thread is in; -1: none. */
  private readonly mark: Int8Array;
  /** By line: the line that its samples are charged to; -1 where nothing around it is Python. */
  private readonly charged: Int32Array;
  /** Functions that are tasks. */
  readonly tasks: number[];

  constructor(readonly data: Data) {
    const { functions, strings } = data.document;
    this.noPython = functions.name.length;
    functions.kind.push(SPECIAL);
    functions.name.push(strings.push("<no Python frame>") - 1);
    functions.file.push(strings.push("") - 1);
    functions.place.push(functions.file[this.noPython]!);
    functions.module.push(functions.name[this.noPython]!);
    this.names = functions.name.map((_, func) => this.label(func));
    this.mark = Int8Array.from(functions.name, (_, func) => (this.kind(func) === SPECIAL ? stateOfMark(this.name(func)) : -1));
    this.tasks = functions.file.flatMap((_, func) => (this.isTask(func) ? [func] : []));
    this.shown = this.tree(true);
    const { parent, func } = data.lines;
    this.outermost = outermost(parent, func, this.names.length);
    this.charged = new Int32Array(parent.length);
    const passes = Uint8Array.from(functions.name, (_, func) => (this.isMachine(func) ? 1 : 0));
    for (let i = 0; i < parent.length; i++) {
      const what = func[i]!, above = parent[i]!;
      // A wait belongs to the line that waits.
      if (passes[what] === 1) this.charged[i] = above < 0 ? -1 : this.charged[above]!;
      else this.charged[i] = this.mark[what]! >= 0 && above >= 0 ? this.charged[above]! : i;
    }
  }

  get folded(): Tree {
    return (this.foldedTree ??= this.tree(false));
  }

  kind(func: number): number { return this.data.document.functions.kind[func]!; }
  isMachine(func: number): boolean { const kind = this.kind(func); return kind === NATIVE || kind === KERNEL; }
  /** It stands for a task, whose frames lie above it: `<task> NAME`, as CPython shows tasks. */
  isTask(func: number): boolean { return this.file(func) === "<task>" || (this.kind(func) === SPECIAL && this.name(func).startsWith("<task> ")); }
  /** The name of a task. */
  task(func: number): string { return this.name(func).replace(/^<task> /, ""); }
  /** It says what its thread waited for, or which event a stack was taken at: no code. */
  isMark(func: number): boolean { return this.mark[func]! >= 0 || (this.kind(func) === SPECIAL && this.name(func).startsWith("<event: ")); }
  stateOfMark(func: number): number { return this.mark[func]!; }
  text(index: number): string { return this.data.document.strings[index]!; }
  name(func: number): string { return this.text(this.data.document.functions.name[func]!); }
  file(func: number): string { return this.text(this.data.document.functions.file[func]!); }
  /** Its file as people know it: without the directories of libraries. */
  place(func: number): string { return this.text(this.data.document.functions.place[func]!); }
  module(func: number): number { return this.data.document.functions.module[func]!; }

  private label(func: number): string {
    const name = this.name(func), place = this.place(func);
    if (this.kind(func) === KERNEL) return `[k] ${name}`;
    if (this.isTask(func)) return `<task> ${this.task(func)}`;
    return place ? `${name} (${place})` : name;
  }

  /** `native`: whether native code has nodes of its own. */
  private tree(native: boolean): Tree {
    const { parent, func } = this.data.lines;
    const machine = Uint8Array.from(this.data.document.functions.name, (_, what) => (this.isMachine(what) ? 1 : 0));
    const of = new Int32Array(parent.length);
    const parents: number[] = [], funcs: number[] = [];
    // By line: whether it and all its callers are native.
    const outer = new Uint8Array(parent.length);
    const table = new PairTable(parent.length);
    let above = -1, what = 0;
    const added = () => {
      parents.push(above);
      funcs.push(what);
    };
    let withoutPython = false;
    for (let i = 0; i < parent.length; i++) {
      const caller = parent[i]!;
      what = func[i]!;
      const isMachine = machine[what] === 1, isFirst = caller < 0 || outer[caller] === 1;
      outer[i] = isMachine && isFirst ? 1 : 0;
      above = caller < 0 || (native && isFirst && !isMachine) ? -1 : of[caller]!;
      of[i] = !native && isMachine ? above : table.id(above + 1, what, added);
      withoutPython ||= of[i] === -1;
    }
    if (withoutPython) {
      above = -1;
      what = this.noPython;
      const none = table.id(0, what, added);
      for (let i = 0; i < of.length; i++) if (of[i] === -1) of[i] = none;
    }
    const own = Int32Array.from(parents);
    return { parent: own, func: Uint32Array.from(funcs), of, ...links(own) };
  }

  /** By line: whether it or one of its callers is such a function. */
  private withFunction(isSuch: (func: number) => boolean): Uint8Array {
    const { parent, func } = this.data.lines;
    const such = Uint8Array.from(this.names, (_, func) => (isSuch(func) ? 1 : 0));
    return below(parent, (i) => such[func[i]!] === 1);
  }

  /** `only`: of threads. */
  sums(filter: Filter, only?: (thread: number) => boolean): Sums {
    const { document, samples, lines } = this.data;
    const own = new Float64Array(lines.parent.length);
    let waiting: Float64Array | null = null;
    const times = Array.from({ length: STATE_COUNT }, () => new Float64Array(document.buckets));
    const states = new Float64Array(STATE_COUNT);
    const inModule = filter.module === null ? null : this.withFunction((func) => this.module(func) === filter.module);
    const inTask = filter.task === null ? null : this.withFunction((func) => func === filter.task);
    const [from, to] = filter.range ?? [0, Infinity];
    const wanted = filter.state;
    let total = 0;
    const { thread, bucket, start, node, state, count } = samples, { func } = lines, { mark } = this;
    for (let group = 0; group < thread.length; group++) {
      const of = thread[group]!, at = bucket[group]!;
      if (only && !only(of)) continue;
      if (filter.thread !== null && of !== filter.thread) continue;
      if (filter.process !== null && document.threads[of]!.process !== filter.process) continue;
      const inside = at >= from && at < to;
      for (let i = start[group]!, end = start[group + 1]!; i < end; i++) {
        const line = node[i]!, many = count[i]!;
        if ((inModule && !inModule[line]) || (inTask && !inTask[line])) continue;
        const marked = mark[func[line]!]!, did = marked >= 0 ? marked : state[i]!;
        times[did]![at]! += many;
        if (!inside || (wanted !== null && did !== wanted)) continue;
        own[line]! += many;
        states[did]! += many;
        total += many;
        if (isWait(did)) (waiting ??= new Float64Array(own.length))[line]! += many;
      }
    }
    return { samples: total, own, total: totals(lines.parent, own), waiting, times, states };
  }

  /** Without any filter. */
  get everything(): Sums {
    return (this.all ??= this.sums(EVERYTHING));
  }

  /** Own and total by node of a tree. */
  nodes(tree: Tree, sums: Sums): { own: Float64Array; total: Float64Array } {
    const own = new Float64Array(tree.parent.length);
    const { of } = tree;
    for (let i = 0; i < sums.own.length; i++) {
      const many = sums.own[i]!;
      if (many > 0) own[of[i]!]! += many;
    }
    return { own, total: totals(tree.parent, own) };
  }

  /** The rows of functions, as `tachyon-bpf report` has them: native code and waits are charged to their Python caller. */
  rows(sums: Sums, native: boolean): Row[] {
    const { func, parent } = this.data.lines;
    const count = this.names.length;
    const own = new Float64Array(count), total = new Float64Array(count), waits = new Float64Array(count);
    for (let i = 0; i < func.length; i++) {
      const many = sums.own[i]!;
      if (many === 0) continue;
      const line = this.charged[i]!, to = line < 0 ? this.noPython : func[line]!;
      own[to]! += many;
      const waited = sums.waiting ? sums.waiting[i]! : 0;
      waits[to]! += waited;
      if (!native) continue;
      const code = this.mark[func[i]!]! >= 0 && parent[i]! >= 0 ? func[parent[i]!]! : func[i]!;
      if (!this.isMachine(code)) continue;
      own[code]! += many;
      waits[code]! += waited;
    }
    const all = sums.total;
    for (let i = 0; i < all.length; i++) if (this.outermost[i] === 1) total[func[i]!]! += all[i]!;
    total[this.noPython] = own[this.noPython]!;
    const rows: Row[] = [];
    for (let i = 0; i < count; i++) {
      if (total[i] === 0 || (!native && this.isMachine(i))) continue;
      // Marks and tasks are told by themselves.
      if (own[i] === 0 && (this.isMark(i) || this.isTask(i))) continue;
      rows.push({ func: i, own: own[i]!, total: total[i]!, waiting: waits[i]! });
    }
    return rows;
  }

  /** By function: the line with most of its self, of those that are asked for. */
  hottest(sums: Sums, wanted: Set<number>): Map<number, number> {
    const { func, line } = this.data.lines;
    const lines = new Map<number, Map<number, number>>();
    for (let i = 0; i < func.length; i++) {
      const many = sums.own[i]!, at = many === 0 ? -1 : this.charged[i]!;
      if (at < 0 || line[at] === 0 || !wanted.has(func[at]!)) continue;
      let own = lines.get(func[at]!);
      if (!own) lines.set(func[at]!, (own = new Map()));
      own.set(line[at]!, (own.get(line[at]!) ?? 0) + many);
    }
    const first = (own: Map<number, number>) => [...own].reduce((a, b) => (b[1] > a[1] || (b[1] === a[1] && b[0] < a[0]) ? b : a))[0];
    return new Map([...lines].map(([func, own]) => [func, first(own)]));
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

  /** What a function's own samples were, by state, and the native code that they were in. */
  inside(sums: Sums, wanted: number): { states: Float64Array; native: Edge[] } {
    const { func, parent } = this.data.lines;
    const states = new Float64Array(STATE_COUNT), native = new Map<number, number>();
    for (let i = 0; i < func.length; i++) {
      const many = sums.own[i]!;
      if (many === 0) continue;
      const line = this.charged[i]!;
      if ((line < 0 ? this.noPython : func[line]!) !== wanted) continue;
      const marked = this.mark[func[i]!]!;
      if (marked >= 0) states[marked]! += many;
      const code = marked >= 0 && parent[i]! >= 0 ? func[parent[i]!]! : func[i]!;
      if (this.isMachine(code)) native.set(code, (native.get(code) ?? 0) + many);
    }
    return { states, native: [...native].map(([func, samples]) => ({ func, samples })).sort((a, b) => b.samples - a.samples || a.func - b.func) };
  }

  /** Lines that have samples, of the functions that are asked for. Native code and waits are charged to the line that called it. */
  lines(sums: Sums, wanted: (func: number) => boolean): LineRow[] {
    const { parent, func, line, position } = this.data.lines;
    const { positions } = this.data.document;
    const such = Uint8Array.from(this.names, (_, func) => (wanted(func) ? 1 : 0));
    const all = sums.total;
    const rows = new Map<string, LineRow>(), marks = new Map<string, Mark>();
    const row = (at: number): LineRow => {
      const key = `${func[at]} ${line[at]}`;
      let found = rows.get(key);
      if (!found) rows.set(key, (found = { func: func[at]!, line: line[at]!, own: 0, total: 0, marks: [] }));
      return found;
    };
    const mark = (at: number): Mark | undefined => {
      if (!positions || position[at] === 0) return undefined;
      const key = `${func[at]} ${line[at]} ${position[at]}`;
      let found = marks.get(key);
      if (!found) {
        const [from, to] = positions[position[at]!]!;
        marks.set(key, (found = { from, to, own: 0, total: 0 }));
        row(at).marks.push(found);
      }
      return found;
    };
    for (let i = 0; i < parent.length; i++) {
      if (all[i] === 0) continue;
      const charged = this.charged[i]!;
      const holder = such[func[i]!] === 1 && this.isMachine(func[i]!) ? i : charged;
      if (sums.own[i]! > 0 && holder >= 0 && such[func[holder]!] === 1) {
        row(holder).own += sums.own[i]!;
        const part = mark(holder);
        if (part) part.own += sums.own[i]!;
      }
      if (such[func[i]!] === 0) continue;
      let line_again = false, part_again = false;
      for (let at = parent[i]!; at >= 0 && !part_again; at = parent[at]!) {
        if (func[at] !== func[i] || line[at] !== line[i]) continue;
        line_again = true;
        part_again = position[at] === position[i];
      }
      if (!line_again) row(i).total += all[i]!;
      const part = mark(i);
      if (part && !part_again) part.total += all[i]!;
    }
    return [...rows.values()];
  }

  /** Samples by state and piece of time, for groups of threads: `groups` has the group of each thread, -1 for none. */
  lanes(groups: Int32Array, count: number): Float64Array[][] {
    const { document, samples, lines } = this.data;
    const lanes = Array.from({ length: count }, () => Array.from({ length: STATE_COUNT }, () => new Float64Array(document.buckets)));
    for (let group = 0; group < samples.thread.length; group++) {
      const to = groups[samples.thread[group]!]!;
      if (to < 0) continue;
      for (let i = samples.start[group]!; i < samples.start[group + 1]!; i++) {
        const marked = this.mark[lines.func[samples.node[i]!]!]!, did = marked >= 0 ? marked : samples.state[i]!;
        lanes[to]![did]![samples.bucket[group]!]! += samples.count[i]!;
      }
    }
    return lanes;
  }

  /** Samples by thread. */
  byThread(): Float64Array {
    const { document, samples } = this.data;
    const by = new Float64Array(document.threads.length);
    for (let group = 0; group < samples.thread.length; group++)
      for (let i = samples.start[group]!; i < samples.start[group + 1]!; i++) by[samples.thread[group]!]! += samples.count[i]!;
    return by;
  }

  /** What each task did itself, and with those that it awaits. */
  taskRows(sums: Sums): Row[] {
    const { parent, func } = this.data.lines;
    const isTask = Uint8Array.from(this.names, (_, func) => (this.isTask(func) ? 1 : 0));
    // By line: the innermost task that it is in.
    const inside = new Int32Array(parent.length);
    const own = new Float64Array(this.names.length), total = new Float64Array(this.names.length), waits = new Float64Array(this.names.length);
    for (let i = 0; i < parent.length; i++) {
      const what = func[i]!;
      inside[i] = isTask[what] === 1 ? what : parent[i]! < 0 ? -1 : inside[parent[i]!]!;
      if (isTask[what] === 1 && this.outermost[i] === 1) total[what]! += sums.total[i]!;
      if (sums.own[i] === 0 || inside[i]! < 0) continue;
      own[inside[i]!]! += sums.own[i]!;
      if (sums.waiting) waits[inside[i]!]! += sums.waiting[i]!;
    }
    const rows = this.tasks.map((func) => ({ func, own: own[func]!, total: total[func]!, waiting: waits[func]! }));
    return rows.filter((row) => row.total > 0).sort((a, b) => b.own - a.own || b.total - a.total);
  }

  /** Samples whose stack has one of the functions in it. */
  matching(sums: Sums, found: Uint8Array): number {
    const flags = this.withFunction((func) => found[func] === 1);
    let samples = 0;
    for (let i = 0; i < flags.length; i++) if (flags[i]) samples += sums.own[i]!;
    return samples;
  }
}
