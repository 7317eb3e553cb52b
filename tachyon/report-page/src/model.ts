// What the views show of the samples that the filters let through. All sums are samples.

import { type Data, KERNEL, NATIVE, SPECIAL } from "./data";
import { isWait, STATE_COUNT, stateOfMark } from "./states";
import { Calls, PairTable, Tree, Weighed } from "./tree";

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
  /** By stack. */
  own: Float64Array;
  /** By line, all that is below it. */
  total: Weighed;
  /** By stack: those of its own that waited; `null`: none did. */
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

/** By group: its samples by state, and whether some of them waited. */
interface States { did: Float64Array; waits: Uint8Array }
interface Places { of: Int32Array; func: Uint32Array; line: Uint32Array }

export class Model {
  readonly names: string[];
  /** A stack without Python is charged to this function. */
  readonly noPython: number;
  readonly tree: Tree;
  /** What the graph shows with native code, and without. */
  readonly shown: Calls;
  readonly folded: Calls;
  private all: Sums | null = null;
  private knownRows: Row[] | null = null;
  /** By function: the state that it says its thread is in; -1: none. */
  private readonly mark: Int8Array;
  /** By stack: the state that its innermost function says; -1: none. */
  private readonly marked: Int8Array;
  /** By stack: the line that its samples are charged to; -1 where nothing around it is Python. */
  private readonly charged: Int32Array;
  /** By function: whether it is native code. */
  private readonly machine: Uint8Array;
  /** By function: whether it is told by itself, as marks and tasks are. */
  private readonly apart: Uint8Array;
  private readonly known: States;
  private knownPlaces: Places | null = null;
  private lastHottest: [Sums, Uint32Array] | null = null;
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
    this.machine = this.flags((func) => this.isMachine(func));
    this.apart = this.flags((func) => this.isMark(func) || this.isTask(func));
    const { lines: { parent, func }, stacks } = data;
    this.tree = new Tree(data.lines, stacks, this.machine);
    this.shown = new Calls(this.tree, true);
    this.folded = new Calls(this.tree, false);
    this.marked = new Int8Array(stacks.length);
    this.charged = new Int32Array(stacks.length);
    for (let stack = 0; stack < stacks.length; stack++) {
      let at: number = stacks[stack]!;
      this.marked[stack] = this.mark[func[at]!]!;
      // A wait belongs to the line that waits.
      while (at >= 0 && (this.machine[func[at]!] === 1 || (this.mark[func[at]!]! >= 0 && parent[at]! >= 0))) at = parent[at]!;
      this.charged[stack] = at;
    }
    this.known = this.states();
  }

  /** The state of an entry. */
  private stateOf(entry: number): number {
    const marked = this.marked[this.data.samples.stack[entry]!]!;
    return marked >= 0 ? marked : this.data.samples.state[entry]!;
  }

  private states(): States {
    const { thread, start, count } = this.data.samples;
    const did = new Float64Array(thread.length * STATE_COUNT), waits = new Uint8Array(thread.length);
    for (let group = 0; group < thread.length; group++)
      for (let i = start[group]!; i < start[group + 1]!; i++) {
        const id = this.stateOf(i);
        did[group * STATE_COUNT + id]! += count[i]!;
        if (isWait(id)) waits[group] = 1;
      }
    return { did, waits };
  }

  /** By function. */
  private flags(isSuch: (func: number) => boolean): Uint8Array {
    return Uint8Array.from(this.data.document.functions.name, (_, func) => (isSuch(func) ? 1 : 0));
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

  /** `only`: of threads. */
  sums(filter: Filter, only?: (thread: number) => boolean): Sums {
    const { document, samples } = this.data;
    const own = new Float64Array(this.data.stacks.length);
    let waiting: Float64Array | null = null;
    const times = Array.from({ length: STATE_COUNT }, () => new Float64Array(document.buckets));
    const states = new Float64Array(STATE_COUNT);
    let passed: Uint8Array | null = null;
    if (filter.module !== null) passed = this.tree.within(this.flags((func) => this.module(func) === filter.module));
    if (filter.task !== null) {
      const inTask = this.tree.within(this.flags((func) => func === filter.task));
      passed = passed ? passed.map((flag, stack) => flag & inTask[stack]!) : inTask;
    }
    const [from, to] = filter.range ?? [0, Infinity];
    const wanted = filter.state;
    const { thread, bucket, start, stack, count } = samples, { did, waits } = this.known;
    // By state, of one group: its piece of time is the same.
    const here = new Float64Array(STATE_COUNT);
    let visited = 0;
    for (let group = 0; group < thread.length; group++) {
      const of = thread[group]!, at = bucket[group]!;
      if (only && !only(of)) continue;
      if (filter.thread !== null && of !== filter.thread) continue;
      if (filter.process !== null && document.threads[of]!.process !== filter.process) continue;
      const inside = at >= from && at < to, first = start[group]!, end = start[group + 1]!;
      if (inside || passed) visited += end - first;
      if (passed) {
        here.fill(0);
        for (let i = first; i < end; i++) if (passed[stack[i]!] === 1) here[this.stateOf(i)]! += count[i]!;
      } else here.set(did.subarray(group * STATE_COUNT, (group + 1) * STATE_COUNT));
      for (let id = 0; id < STATE_COUNT; id++) {
        times[id]![at]! += here[id]!;
        if (inside && (wanted === null || id === wanted)) states[id]! += here[id]!;
      }
      if (!inside) continue;
      if (!passed && wanted === null && waits[group] === 0) {
        for (let i = first; i < end; i++) own[stack[i]!]! += count[i]!;
        continue;
      }
      for (let i = first; i < end; i++) {
        const which = stack[i]!, many = count[i]!, id = this.stateOf(i);
        if ((passed && passed[which] === 0) || (wanted !== null && id !== wanted)) continue;
        own[which]! += many;
        if (isWait(id)) (waiting ??= new Float64Array(own.length))[which]! += many;
      }
    }
    // Seen in a browser's timeline, and by tests: entries that were looked at.
    performance.mark("sums", { detail: visited });
    return { samples: states.reduce((a, b) => a + b, 0), own, total: new Weighed(this.tree, own), waiting, times, states };
  }

  /** Without any filter. */
  get everything(): Sums {
    return (this.all ??= this.sums(EVERYTHING));
  }

  /** Of everything, native code's too. */
  get allRows(): Row[] {
    return (this.knownRows ??= this.rows(this.everything, true));
  }

  /** The function that a stack is charged to. */
  private chargedTo(stack: number): number {
    const line = this.charged[stack]!;
    return line < 0 ? this.noPython : this.data.lines.func[line]!;
  }

  /** The function whose code was running when a stack was taken; what it waited for is none. */
  private code(stack: number): number {
    const { func, parent } = this.data.lines;
    const leaf = this.data.stacks[stack]!, above = parent[leaf]!;
    return func[this.marked[stack]! >= 0 && above >= 0 ? above : leaf]!;
  }

  /** The rows of functions, as `tachyon-bpf report` has them: native code and waits are charged to their Python caller. */
  rows(sums: Sums, native: boolean): Row[] {
    if (native && this.knownRows && sums === this.all) return this.knownRows;
    const { func, end, from, to, outermost } = this.tree, { all } = sums.total;
    const count = this.names.length;
    const own = new Float64Array(count), total = new Float64Array(count), waits = new Float64Array(count);
    for (let i = 0; i < sums.own.length; i++) {
      const many = sums.own[i]!;
      if (many === 0) continue;
      const to = this.chargedTo(i);
      own[to]! += many;
      const waited = sums.waiting ? sums.waiting[i]! : 0;
      waits[to]! += waited;
      if (!native) continue;
      const code = this.code(i);
      if (this.machine[code] === 0) continue;
      own[code]! += many;
      waits[code]! += waited;
    }
    for (let i = 0, first = -1, last = -1, many = 0; i < func.length;) {
      // Most lines have only one callee, and its stacks are the same.
      if (from[i] !== first || to[i] !== last) many = all[(last = to[i]!)]! - all[(first = from[i]!)]!;
      if (many > 0 && outermost[i] === 1) total[func[i]!]! += many;
      i = many > 0 ? i + 1 : end[i]!;
    }
    total[this.noPython] = own[this.noPython]!;
    const rows: Row[] = [];
    for (let i = 0; i < count; i++) {
      if (total[i] === 0 || (!native && this.isMachine(i))) continue;
      // Marks and tasks are told by themselves.
      if (own[i] === 0 && this.apart[i] === 1) continue;
      rows.push({ func: i, own: own[i]!, total: total[i]!, waiting: waits[i]! });
    }
    return rows;
  }

  /** Lines that stacks are charged to, each once: the function and the line, and by stack which one it is (-1: none). */
  private get places(): Places {
    if (this.knownPlaces) return this.knownPlaces;
    const { func, line } = this.data.lines;
    const funcs: number[] = [], lines: number[] = [];
    const table = new PairTable(this.charged.length), of = new Int32Array(this.charged.length).fill(-1);
    for (let stack = 0; stack < of.length; stack++) {
      const at = this.charged[stack]!;
      if (at < 0 || line[at] === 0) continue;
      const place = (of[stack] = table.id(func[at]!, line[at]!));
      funcs[place] = func[at]!;
      lines[place] = line[at]!;
    }
    return (this.knownPlaces = { of, func: Uint32Array.from(funcs), line: Uint32Array.from(lines) });
  }

  /** By function: the line with most of its self; 0: none. */
  hottest(sums: Sums): Uint32Array {
    if (this.lastHottest?.[0] === sums) return this.lastHottest[1];
    const { of, func, line } = this.places;
    const own = new Float64Array(func.length), most = new Float64Array(this.names.length), hottest = new Uint32Array(this.names.length);
    for (let i = 0; i < of.length; i++) if (of[i]! >= 0) own[of[i]!]! += sums.own[i]!;
    for (let i = 0; i < own.length; i++) {
      const what = func[i]!, more = own[i]! - most[what]!;
      if (own[i] === 0 || more < 0 || (more === 0 && line[i]! > hottest[what]!)) continue;
      most[what] = own[i]!;
      hottest[what] = line[i]!;
    }
    this.lastHottest = [sums, hottest];
    return hottest;
  }

  /** Who calls a function, and whom it calls; a stack counts once, however often the call is in it. */
  edges(calls: Calls, { total }: Sums, wanted: number): { callers: Edge[]; callees: Edge[] } {
    const sides = [new Map<number, number>(), new Map<number, number>()];
    const { func } = this.tree;
    const look = (line: number, above: number) => {
      const many = total.shown(line), callee = func[line]!, caller = func[above]!;
      if (many === 0 || callee === caller) return;
      for (let at = above, next = calls.caller(at); next >= 0; at = next, next = calls.caller(at))
        if (func[at] === callee && func[next] === caller) return;
      const [side, other] = callee === wanted ? [sides[0]!, caller] : [sides[1]!, callee];
      side.set(other, (side.get(other) ?? 0) + many);
    };
    for (let i = 0; i < func.length; i++) {
      if (func[i] !== wanted || calls.innermost(i) !== i) continue;
      const above = calls.caller(i);
      if (above >= 0) look(i, above);
      calls.callees(i, (line) => look(line, i));
    }
    const [callers, callees] = sides.map((side) =>
      [...side].map(([func, samples]) => ({ func, samples })).sort((a, b) => b.samples - a.samples || a.func - b.func));
    return { callers: callers!, callees: callees! };
  }

  /** What a function's own samples were, by state, and the native code that they were in. */
  inside(sums: Sums, wanted: number): { states: Float64Array; native: Edge[] } {
    const states = new Float64Array(STATE_COUNT), native = new Map<number, number>();
    for (let i = 0; i < sums.own.length; i++) {
      const many = sums.own[i]!;
      if (many === 0 || this.chargedTo(i) !== wanted) continue;
      const marked = this.marked[i]!, code = this.code(i);
      if (marked >= 0) states[marked]! += many;
      if (this.isMachine(code)) native.set(code, (native.get(code) ?? 0) + many);
    }
    return { states, native: [...native].map(([func, samples]) => ({ func, samples })).sort((a, b) => b.samples - a.samples || a.func - b.func) };
  }

  /** Lines that have samples, of the functions that are asked for. Native code and waits are charged to the line that called it. */
  lines(sums: Sums, wanted: (func: number) => boolean): LineRow[] {
    const { parent, func, line, position } = this.data.lines;
    const { positions } = this.data.document;
    const such = this.flags(wanted);
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
    for (let stack = 0; stack < sums.own.length; stack++) {
      const many = sums.own[stack]!, leaf: number = this.data.stacks[stack]!;
      if (many === 0) continue;
      const holder = such[func[leaf]!] === 1 && this.machine[func[leaf]!] === 1 ? leaf : this.charged[stack]!;
      if (holder < 0 || such[func[holder]!] === 0) continue;
      row(holder).own += many;
      const part = mark(holder);
      if (part) part.own += many;
    }
    for (let i = 0; i < parent.length; i++) {
      if (such[func[i]!] === 0) continue;
      const many = sums.total.below(i);
      if (many === 0) continue;
      let line_again = false, part_again = false;
      for (let at = parent[i]!; at >= 0 && !part_again; at = parent[at]!) {
        if (func[at] !== func[i] || line[at] !== line[i]) continue;
        line_again = true;
        part_again = position[at] === position[i];
      }
      if (!line_again) row(i).total += many;
      const part = mark(i);
      if (part && !part_again) part.total += many;
    }
    return [...rows.values()];
  }

  /** Samples by state and piece of time, for groups of threads: `groups` has the group of each thread, -1 for none. */
  lanes(groups: Int32Array, count: number): Float64Array[][] {
    const { document, samples } = this.data;
    const lanes = Array.from({ length: count }, () => Array.from({ length: STATE_COUNT }, () => new Float64Array(document.buckets)));
    for (let group = 0; group < samples.thread.length; group++) {
      const to = groups[samples.thread[group]!]!, at = samples.bucket[group]!;
      if (to >= 0) for (let id = 0; id < STATE_COUNT; id++) lanes[to]![id]![at]! += this.known.did[group * STATE_COUNT + id]!;
    }
    return lanes;
  }

  /** Samples by thread. */
  byThread(): Float64Array {
    const { document, samples } = this.data;
    const by = new Float64Array(document.threads.length);
    for (let group = 0; group < samples.thread.length; group++)
      for (let id = 0; id < STATE_COUNT; id++) by[samples.thread[group]!]! += this.known.did[group * STATE_COUNT + id]!;
    return by;
  }

  /** What each task did itself, and with those that it awaits. */
  taskRows(sums: Sums): Row[] {
    const { lines: { parent, func }, stacks } = this.data;
    const isTask = this.flags((func) => this.isTask(func));
    // By line: the innermost task that it is in.
    const inside = new Int32Array(parent.length);
    const own = new Float64Array(this.names.length), total = new Float64Array(this.names.length), waits = new Float64Array(this.names.length);
    for (let i = 0; i < parent.length; i++) {
      const what = func[i]!;
      inside[i] = isTask[what] === 1 ? what : parent[i]! < 0 ? -1 : inside[parent[i]!]!;
      if (isTask[what] === 1 && this.tree.outermost[i] === 1) total[what]! += sums.total.below(i);
    }
    stacks.forEach((leaf, stack) => {
      const task = inside[leaf]!;
      if (task < 0) return;
      own[task]! += sums.own[stack]!;
      if (sums.waiting) waits[task]! += sums.waiting[stack]!;
    });
    const rows = this.tasks.map((func) => ({ func, own: own[func]!, total: total[func]!, waiting: waits[func]! }));
    return rows.filter((row) => row.total > 0).sort((a, b) => b.own - a.own || b.total - a.total);
  }

  /** Samples whose stack has one of the functions in it. */
  matching(sums: Sums, found: Uint8Array): number {
    const flags = this.tree.within(found);
    let samples = 0;
    for (let i = 0; i < flags.length; i++) if (flags[i]) samples += sums.own[i]!;
    return samples;
  }
}
