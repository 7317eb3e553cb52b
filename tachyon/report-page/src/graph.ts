// Boxes of the flame graph: where they are, and how they are painted. Only boxes that can be seen are made, so the time this
// takes does not depend on how many stacks there are.

import { KERNEL, NATIVE, PYTHON } from "./data";
import type { Weights } from "./difference";
import type { Model, Tree } from "./model";

export type Layout = "flame" | "icicle" | "inverted";
export type Colouring = "kind" | "self" | "module" | "change";

export interface Box {
  func: number;
  depth: number;
  /** Samples to its left, and in it. */
  at: number;
  total: number;
  own: number;
  /** By how much its share grew, in a comparison. */
  grown: number;
  /** Index of the box below it in the stack; -1 for the whole. */
  parent: number;
}

export interface Boxes {
  boxes: Box[];
  /** Samples of the whole width. */
  width: number;
  depth: number;
  /** The zoomed box. */
  zoomed: number;
}

export const ALL = -1;
export const ROW = 19;


/** A set of nodes that are one box, with the samples of each. */
interface Group { func: number; total: number; own: number; grown: number; nodes: number[]; samples: number[]; changes: number[] }

/** `path`: the functions down to the zoomed box. `least`: samples of the narrowest box, of those of the whole width. */
export function layOut(tree: Tree, weights: Weights, samples: number, inverted: boolean, path: number[], share: number): Boxes {
  const boxes: Box[] = [{ func: ALL, depth: 0, at: 0, total: samples, own: 0, grown: 0, parent: -1 }];
  const children = inverted ? callers(tree, weights) : callees(tree, weights);
  let group: Group | null = null, width = samples, zoomed = 0;
  for (const func of path) {
    const next: Group | undefined = children(group, 0).find((child) => child.func === func);
    if (!next) break;
    group = next;
    width = group.total;
    boxes.push({ func, depth: boxes.length, at: 0, total: group.total, own: group.own, grown: group.grown, parent: boxes.length - 1 });
    zoomed = boxes.length - 1;
  }
  const least = Math.max(width * share, Number.MIN_VALUE);
  const open: [Group | null, number][] = [[group, zoomed]];
  let deepest = boxes[zoomed]!.depth;
  for (let entry = open.pop(); entry; entry = open.pop()) {
    const [above, index] = entry;
    const { depth } = boxes[index]!;
    let at = boxes[index]!.at;
    for (const child of children(above, least)) {
      const own = boxes.push({ func: child.func, depth: depth + 1, at, total: child.total, own: child.own, grown: child.grown, parent: index }) - 1;
      deepest = Math.max(deepest, depth + 1);
      open.push([child, own]);
      at += child.total;
    }
  }
  return { boxes, width, depth: deepest + 1, zoomed };
}

const widestFirst = (a: Group, b: Group) => b.total - a.total || a.func - b.func;

function callees(tree: Tree, { own, total, grownTotal }: Weights) {
  return (above: Group | null, least: number): Group[] => {
    const found: Group[] = [];
    for (let at = above ? tree.firstChild[above.nodes[0]!]! : tree.roots; at >= 0; at = tree.nextSibling[at]!)
      if (total[at]! > 0 && total[at]! >= least)
        found.push({ func: tree.func[at]!, total: total[at]!, own: own[at]!, grown: grownTotal?.[at] ?? 0, nodes: [at], samples: [], changes: [] });
    return found.sort(widestFirst);
  };
}

/** A box is what was running; above it who called that. Its own samples are those of stacks that begin there. */
function callers(tree: Tree, { own, grownOwn }: Weights) {
  let first: Group | null = null;
  return (above: Group | null, least: number): Group[] => {
    if (!above) {
      if (!first) {
        first = { func: ALL, total: 0, own: 0, grown: 0, nodes: [], samples: [], changes: [] };
        for (let i = 0; i < own.length; i++)
          if (own[i]! > 0) first.nodes.push(i), first.samples.push(own[i]!), first.changes.push(grownOwn?.[i] ?? 0);
      }
      return grouped(tree, first, least);
    }
    const up: Group = { func: ALL, total: 0, own: 0, grown: 0, nodes: [], samples: [], changes: [] };
    above.nodes.forEach((node, i) => {
      const parent = tree.parent[node]!;
      if (parent >= 0) up.nodes.push(parent), up.samples.push(above.samples[i]!), up.changes.push(above.changes[i]!);
    });
    return grouped(tree, up, least);
  };
}

function grouped(tree: Tree, { nodes, samples, changes }: Group, least: number): Group[] {
  const groups = new Map<number, Group>();
  for (let i = 0; i < nodes.length; i++) {
    const node = nodes[i]!, func = tree.func[node]!, many = samples[i]!;
    let group = groups.get(func);
    if (!group) groups.set(func, (group = { func, total: 0, own: 0, grown: 0, nodes: [], samples: [], changes: [] }));
    group.total += many;
    if (tree.parent[node]! < 0) group.own += many;
    group.nodes.push(node);
    group.samples.push(many);
    group.changes.push(changes[i]!);
    group.grown += changes[i]!;
  }
  return [...groups.values()].filter((group) => group.total >= least).sort(widestFirst);
}

// Okabe and Ito's colours, which people with any kind of colour vision tell apart.
const KINDS: Record<number, [number, number, number]> = {
  [PYTHON]: [38, 92, 62], [NATIVE]: [202, 76, 68], [KERNEL]: [325, 42, 74], 3: [0, 0, 76],
};
const MODULES = [38, 202, 164, 56, 325, 18, 250, 90];

export function colour(model: Model, box: Box, width: number, by: Colouring): string {
  if (box.func === ALL) return "hsl(0 0% 82%)";
  const hash = Math.imul(box.func + 1, 0x9e3779b1) >>> 24;
  if (by === "change") {
    // Red and blue, told apart with any kind of colour vision; as much of a colour as the share grew, relative to itself.
    const mean = box.total / Math.max(1, width), relative = mean > 0 ? Math.min(1, Math.abs(box.grown) / (2 * mean)) : 0;
    const strength = Math.abs(box.grown) < 0.0005 ? 0 : Math.sqrt(relative);
    return `hsl(${box.grown > 0 ? 8 : 210} ${Math.round(85 * Math.min(1, strength * 3))}% ${Math.round(90 - 32 * strength)}%)`;
  }
  if (by === "self") {
    const share = Math.sqrt(Math.min(1, box.own / Math.max(1, width)));
    return `hsl(${Math.round(50 - 35 * share)} 95% ${Math.round(93 - 35 * share)}%)`;
  }
  if (by === "module" && model.kind(box.func) !== 3) {
    const module = Math.imul(model.module(box.func) + 1, 0x85ebca6b) >>> 20;
    return `hsl(${MODULES[module % MODULES.length]} 65% ${66 + (module >> 4) % 14}%)`;
  }
  const [hue, saturation, lightness] = KINDS[model.kind(box.func)]!;
  return `hsl(${hue} ${saturation}% ${lightness + hash % 12}%)`;
}

export interface Painting {
  model: Model;
  /** What the whole is called. */
  all: string;
  layout: Layout;
  colouring: Colouring;
  /** Functions that the search found. */
  found: Uint8Array | null;
  selected: number | null;
  /** Index of the box under the pointer or the keyboard's. */
  current: number;
  width: number;
  height: number;
  /** Pixels scrolled. */
  top: number;
}

/** Top edge of a box in the whole drawing of `height` pixels. */
export function row(layout: Layout, depth: number, height: number): number {
  return layout === "flame" ? height - (depth + 1) * ROW : depth * ROW;
}

export function place(boxes: Boxes, index: number, pixels: number): [number, number] {
  const box = boxes.boxes[index]!;
  const isAncestor = box.depth < boxes.boxes[boxes.zoomed]!.depth;
  const scale = pixels / Math.max(1, boxes.width);
  return isAncestor ? [0, pixels] : [box.at * scale, box.total * scale];
}

export function paint(context: CanvasRenderingContext2D, boxes: Boxes, whole: number, painting: Painting): void {
  const { model, layout, colouring, found, width, height, top } = painting;
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  for (let index = 0; index < boxes.boxes.length; index++) {
    const box = boxes.boxes[index]!;
    const y = row(layout, box.depth, whole) - top;
    if (y > height || y + ROW < 0) continue;
    const [x, across] = place(boxes, index, width);
    const isFound = !found || (box.func !== ALL && found[box.func] === 1);
    context.globalAlpha = isFound ? (index < boxes.zoomed ? 0.6 : 1) : 0.25;
    context.fillStyle = colour(model, box, colouring === "change" ? boxes.boxes[0]!.total : boxes.width, colouring);
    context.fillRect(x, y, Math.max(0.5, across - (across > 3 ? 1 : 0)), ROW - 1);
    context.globalAlpha = 1;
    if (index === painting.current || (box.func !== ALL && box.func === painting.selected)) {
      context.lineWidth = 2;
      context.strokeStyle = index === painting.current ? "#111" : "#7a0177";
      context.strokeRect(x + 1, y + 1, Math.max(1, across - 3), ROW - 3);
    }
    if (across < 24) continue;
    const text = box.func === ALL ? painting.all : model.names[box.func]!;
    context.fillStyle = isFound ? "#111" : "#666";
    context.fillText(fitting(text, across - 8), x + 4, y + ROW / 2, across - 6);
  }
}

/** As much of a name as fits, by the mean width of a letter: measuring each would take longer than painting. */
function fitting(text: string, pixels: number): string {
  const most = Math.floor(pixels / 6.9);
  return text.length <= most ? text : most < 3 ? "" : `${text.slice(0, most - 1)}…`;
}

/** The box at a point; -1 for none. */
export function hit(boxes: Boxes, layout: Layout, whole: number, pixels: number, x: number, y: number): number {
  for (let index = boxes.boxes.length - 1; index >= 0; index--) {
    const above = row(layout, boxes.boxes[index]!.depth, whole);
    if (y < above || y >= above + ROW) continue;
    const [left, across] = place(boxes, index, pixels);
    if (x >= left && x < left + Math.max(1, across)) return index;
  }
  return -1;
}

export function pathOf(boxes: Boxes, index: number): number[] {
  const path: number[] = [];
  for (let at = index; at > 0; at = boxes.boxes[at]!.parent) path.unshift(boxes.boxes[at]!.func);
  return path;
}

/** Where an arrow key leads: in the stack, or to the box beside. */
export function neighbour(boxes: Boxes, index: number, key: "in" | "out" | "left" | "right"): number {
  const all = boxes.boxes, box = all[index];
  if (!box) return 0;
  if (key === "out") return Math.max(0, box.parent);
  if (key === "in") {
    const child = all.findIndex((other) => other.parent === index);
    return child < 0 ? index : child;
  }
  let best = index;
  all.forEach((other, at) => {
    if (other.depth !== box.depth || at === index) return;
    const ahead = key === "right" ? other.at > box.at : other.at < box.at;
    const nearer = best === index || Math.abs(other.at - box.at) < Math.abs(all[best]!.at - box.at);
    if (ahead && nearer) best = at;
  });
  return best;
}
