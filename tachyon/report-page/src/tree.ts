// Stacks as a tree of lines in preorder: all that is below a line follows it. So the stacks that end below a line are a range, and
// a sum over them is the difference of two sums: no filter has to visit the tree's nodes to know what is below each.

import type { Lines } from "./data";

export class Tree {
  readonly parent: Int32Array;
  readonly func: Uint32Array;
  /** By line: the line past all that is below it. */
  readonly end: Uint32Array;
  /** By line: the first of the stacks that end in it or below, and the one past the last. */
  readonly from: Uint32Array;
  readonly to: Uint32Array;
  /** By line: whether it and all its callers are native. */
  readonly outer: Uint8Array;
  /** By line: whether no caller of it is the same function. */
  readonly outermost: Uint8Array;

  /** `machine`: by function, whether it is native code. */
  constructor({ parent, func }: Lines, readonly stacks: Uint32Array, readonly machine: Uint8Array) {
    const { length } = parent;
    [this.parent, this.func] = [parent, func];
    const end = (this.end = new Uint32Array(length)), from = (this.from = new Uint32Array(length)), to = (this.to = new Uint32Array(length));
    const outer = (this.outer = new Uint8Array(length)), first = (this.outermost = new Uint8Array(length));
    // By function: how many of it are in the stack at hand.
    const open = new Uint32Array(machine.length);
    for (let i = 0, stack = 0, innermost = -1; i < length; innermost = i++) {
      const above = parent[i]!, what = func[i]!;
      for (; innermost !== above; innermost = parent[innermost]!) open[func[innermost]!]!--;
      first[i] = open[what]!++ === 0 ? 1 : 0;
      outer[i] = machine[what]! & (above < 0 ? 1 : outer[above]!);
      from[i] = stack;
      if (stacks[stack] === i) stack++;
    }
    for (let i = length - 1; i >= 0; i--) {
      // The last child comes first.
      if (end[i] === 0) end[i] = i + 1;
      const last = end[i]!, above = parent[i]!;
      to[i] = last < length ? from[last]! : stacks.length;
      if (above >= 0 && end[above] === 0) end[above] = last;
    }
  }

  /** By stack: whether such a function is in it. */
  within(such: Uint8Array): Uint8Array {
    const { func, end, from, to } = this;
    const flags = new Uint8Array(this.stacks.length);
    for (let i = 0; i < func.length;) {
      if (such[func[i]!] === 0) i++;
      else {
        flags.fill(1, from[i], to[i]);
        i = end[i]!;
      }
    }
    return flags;
  }
}

/** Something of each stack, and its sums. */
export class Weighed {
  /** By stack: the sum of all before it; and of those that have no Python frame. */
  readonly all: Float64Array;
  private readonly native: Float64Array;

  constructor(readonly tree: Tree, readonly own: Float64Array) {
    const { stacks, outer } = tree;
    const all = (this.all = new Float64Array(stacks.length + 1)), native = (this.native = new Float64Array(stacks.length + 1));
    for (let i = 0; i < stacks.length; i++) {
      all[i + 1] = all[i]! + own[i]!;
      native[i + 1] = native[i]! + (outer[stacks[i]!] === 1 ? own[i]! : 0);
    }
  }

  /** Of a line and all below it. */
  below(line: number): number {
    return this.all[this.tree.to[line]!]! - this.all[this.tree.from[line]!]!;
  }

  /** The same, as the graph shows it: Python begins its stack, without the native code that started it. */
  shown(line: number): number {
    if (this.tree.outer[line] === 0) return this.below(line);
    return this.native[this.tree.to[line]!]! - this.native[this.tree.from[line]!]!;
  }

  /** Of stacks that have no Python frame. */
  get withoutPython(): number { return this.native[this.own.length]!; }
}

/** Lines as the graph shows them: where Python begins its stack, without the native code that started it. */
export class Calls {
  /** `native`: whether other native code is shown; else it is a part of what called it. */
  constructor(readonly tree: Tree, readonly native: boolean) {}

  /** The lines that are called by one (-1: by none). */
  callees(line: number, visit: (line: number) => void): void {
    const { parent, func, end, outer, machine } = this.tree;
    const last = line < 0 ? parent.length : end[line]!, inOuter = line >= 0 && outer[line] === 1;
    for (let at = line + 1; at < last;) {
      if (!this.native && machine[func[at]!] === 1) at++;
      else if (this.native && line < 0 && outer[at] === 1) {
        if (parent[at]! < 0) visit(at);
        at++;
      } else {
        if (!inOuter || outer[at] === 1) visit(at);
        at = end[at]!;
      }
    }
  }

  /** The line that called one; -1: none. */
  caller(line: number): number {
    const above = this.tree.parent[line]!;
    if (!this.native) return this.innermost(above);
    return above >= 0 && this.tree.outer[above]! > this.tree.outer[line]! ? -1 : above;
  }

  /** The innermost line that is shown of a stack that ends in a line; -1: none. */
  innermost(line: number): number {
    const { parent, func, machine } = this.tree;
    if (!this.native) while (line >= 0 && machine[func[line]!] === 1) line = parent[line]!;
    return line;
  }
}

/** The nodes in preorder, of any order in which parents come before their children. */
export function preorder(parent: Int32Array): Uint32Array {
  const firstChild = new Int32Array(parent.length).fill(-1), nextSibling = new Int32Array(parent.length).fill(-1);
  let roots = -1, length = 0;
  for (let i = parent.length - 1; i >= 0; i--) {
    const above = parent[i]!;
    nextSibling[i] = above < 0 ? roots : firstChild[above]!;
    if (above < 0) roots = i;
    else firstChild[above] = i;
  }
  const order = new Uint32Array(parent.length);
  for (let at = roots; at >= 0;) {
    order[length++] = at;
    if (firstChild[at]! >= 0) at = firstChild[at]!;
    else {
      while (at >= 0 && nextSibling[at]! < 0) at = parent[at]!;
      if (at >= 0) at = nextSibling[at]!;
    }
  }
  return order;
}

/** Numbers for pairs of numbers, in order of first use: a Map takes five times as long. */
export class PairTable {
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

  id(first: number, second: number): number {
    let slot = (Math.imul(first, 0x9e3779b1) ^ Math.imul(second, 0x85ebca6b)) >>> 0;
    slot = (slot ^ (slot >>> 15)) & this.mask;
    for (; this.ids[slot]! >= 0; slot = (slot + 1) & this.mask)
      if (this.first[slot] === first && this.second[slot] === second) return this.ids[slot]!;
    this.first[slot] = first;
    this.second[slot] = second;
    return (this.ids[slot] = this.used++);
  }
}
