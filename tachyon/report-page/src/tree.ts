// Stacks as trees: nodes in an order in which parents come before their children.

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

/** By node: whether it or a node above it is such a one. */
export function below(parent: Int32Array, isSuch: (node: number) => boolean): Uint8Array {
  const flags = new Uint8Array(parent.length);
  for (let i = 0; i < flags.length; i++) flags[i] = (parent[i]! >= 0 && flags[parent[i]!]) || isSuch(i) ? 1 : 0;
  return flags;
}

/** What is a node's own, and what is that of all nodes below it. */
export function totals(parent: Int32Array, own: Float64Array): Float64Array {
  const total = Float64Array.from(own);
  for (let i = total.length - 1; i >= 0; i--) {
    const above = parent[i]!;
    if (above >= 0) total[above]! += total[i]!;
  }
  return total;
}

/** The first child of each node, the next one of its parent, and the first root. */
export function links(parent: Int32Array): { firstChild: Int32Array; nextSibling: Int32Array; roots: number } {
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

/** By node: whether no node above it is of the same function. */
export function outermost(parent: Int32Array, func: Uint32Array, functions: number): Uint8Array {
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
