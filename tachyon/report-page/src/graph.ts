// Boxes of the flame graph: where they are, and how they are painted. Only boxes that can be seen are made, so the time this
// takes does not depend on how many stacks there are.

import { KERNEL, NATIVE, PYTHON } from "./data";
import type { Weights } from "./difference";
import type { Model } from "./model";
import { stateOf } from "./states";
import type { Tree } from "./tree";

export type Layout = "flame" | "icicle" | "inverted";
export type Colouring = "kind" | "self" | "total" | "module" | "change";

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
export const ROW = 20;

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

// Okabe and Ito's colours, which people with any kind of colour vision tell apart: hue, saturation, lightness.
const KINDS: Record<number, [number, number, number]> = {
  [PYTHON]: [38, 92, 60], [NATIVE]: [202, 72, 68], [KERNEL]: [325, 42, 74], 3: [220, 6, 74],
};
const MODULES = [38, 202, 164, 56, 325, 18, 250, 90];

/** From cold to hot: pale to dark orange, which is light and dark to any kind of colour vision. */
function heat(share: number, dark: boolean): string {
  const much = Math.sqrt(Math.min(1, Math.max(0, share)));
  return dark ? `hsl(${46 - 28 * much} ${30 + 60 * much}% ${34 + 22 * much}%)` : `hsl(${50 - 32 * much} 95% ${93 - 37 * much}%)`;
}

/** The colours of kinds of code, as legends show them. */
export function kindColour(kind: number, dark: boolean, lighter = 0): string {
  const [hue, saturation, lightness] = KINDS[kind]!;
  return dark ? `hsl(${hue} ${saturation * 0.72}% ${lightness - 12 + lighter}%)` : `hsl(${hue} ${saturation}% ${lightness + lighter}%)`;
}

/** `whole`: samples of what the colour's shares are of. */
export function colour(model: Model, box: Box, whole: number, by: Colouring, dark: boolean): string {
  if (box.func === ALL) return dark ? "hsl(220 8% 34%)" : "hsl(220 10% 86%)";
  if (by === "change") {
    // Red and blue, told apart with any kind of colour vision; as much of a colour as the share grew, relative to itself.
    const mean = box.total / Math.max(1, whole), relative = mean > 0 ? Math.min(1, Math.abs(box.grown) / (2 * mean)) : 0;
    const strength = Math.abs(box.grown) < 0.0005 ? 0 : Math.sqrt(relative);
    return `hsl(${box.grown > 0 ? 8 : 210} ${Math.round(85 * Math.min(1, strength * 3))}% ${Math.round((dark ? 76 : 90) - (dark ? 18 : 32) * strength)}%)`;
  }
  const state = model.stateOfMark(box.func);
  if (state >= 0) return stateOf(state).colour;
  if (by === "self" || by === "total") return heat((by === "self" ? box.own : box.total) / Math.max(1, whole), dark);
  if (by === "module" && model.kind(box.func) !== 3) {
    const module = Math.imul(model.module(box.func) + 1, 0x85ebca6b) >>> 20;
    return `hsl(${MODULES[module % MODULES.length]} ${dark ? 45 : 65}% ${(dark ? 50 : 66) + (module >> 4) % 14}%)`;
  }
  if (model.isTask(box.func)) return dark ? "hsl(265 35% 58%)" : "hsl(265 60% 80%)";
  // Neighbours of one kind are told apart by their shade.
  return kindColour(model.kind(box.func), dark, (Math.imul(box.func + 1, 0x9e3779b1) >>> 24) % 11);
}

export interface Painting {
  model: Model;
  /** What the whole is called. */
  all: string;
  layout: Layout;
  colouring: Colouring;
  dark: boolean;
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

export const FONT = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";

export function paint(context: CanvasRenderingContext2D, boxes: Boxes, whole: number, painting: Painting): void {
  const { model, layout, colouring, dark, found, width, height, top } = painting;
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  for (let index = 0; index < boxes.boxes.length; index++) {
    const box = boxes.boxes[index]!;
    const y = row(layout, box.depth, whole) - top;
    if (y > height || y + ROW < 0) continue;
    const [x, across] = place(boxes, index, width);
    const isFound = !found || (box.func !== ALL && found[box.func] === 1);
    const isAbove = index < boxes.zoomed;
    context.globalAlpha = isFound ? (isAbove ? 0.55 : 1) : 0.22;
    context.fillStyle = colour(model, box, colouring === "change" ? boxes.boxes[0]!.total : boxes.width, colouring, dark);
    context.fillRect(x, y, Math.max(0.5, across - (across > 3 ? 1 : 0)), ROW - 1);
    context.globalAlpha = 1;
    if (index === painting.current || (box.func !== ALL && box.func === painting.selected)) {
      context.lineWidth = 2;
      context.strokeStyle = index === painting.current ? (dark ? "#fff" : "#111") : dark ? "#ffb3f0" : "#7a0177";
      context.strokeRect(x + 1, y + 1, Math.max(1, across - 3), ROW - 3);
    }
    if (across < 22) continue;
    const text = box.func === ALL ? painting.all : fitting(model, box.func, across - 8);
    context.fillStyle = dark && (box.func === ALL || !isFound) ? "#c8cad0" : isFound ? "#14161a" : "#777";
    context.fillText(text, x + 4, y + ROW / 2, across - 6);
  }
}

/** As much of a name as fits, by the mean width of a letter: measuring each would take longer than painting. */
function fitting(model: Model, func: number, pixels: number): string {
  const most = Math.floor(pixels / 6.6);
  const label = model.names[func]!, name = model.name(func);
  // The name says more than its file.
  const text = label.length <= most ? label : name;
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
