// Boxes of the flame graph: where they are, and how they are painted. Only boxes that can be seen are made, so the time this
// takes does not depend on how many stacks there are.

import { KERNEL, NATIVE, PYTHON } from "./data";
import type { Weights } from "./difference";
import type { Model } from "./model";
import { stateOf } from "./states";
import type { Calls } from "./tree";

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

/** Lines that are one box. */
interface Group {
  func: number;
  total: number;
  /** Known once what is beside it has been asked for. */
  own: number;
  grown: number;
  lines: number[];
  /** Of an inverted graph, by line: the samples that went through it to what ran, and by how much their share grew. */
  samples: number[];
  changes: number[];
}

/** `path`: the functions down to the zoomed box. `share`: of the narrowest box, in the whole width. */
export function layOut(model: Model, calls: Calls, weights: Weights, samples: number, inverted: boolean, path: number[], share: number): Boxes {
  const boxes: Box[] = [{ func: ALL, depth: 0, at: 0, total: samples, own: 0, grown: 0, parent: -1 }];
  const children = inverted ? callers(model, calls, weights) : callees(model, calls, weights);
  const all: Group = { func: ALL, total: samples, own: 0, grown: 0, lines: [], samples: [], changes: [] };
  let group = all, width = samples, zoomed = 0;
  for (const func of path) {
    const next = children(group, 0).find((child) => child.func === func);
    if (zoomed > 0) boxes[zoomed]!.own = group.own;
    if (!next) break;
    group = next;
    width = group.total;
    zoomed = boxes.push({ func, depth: boxes.length, at: 0, total: group.total, own: 0, grown: group.grown, parent: boxes.length - 1 }) - 1;
  }
  const least = Math.max(width * share, Number.MIN_VALUE);
  const open: [Group, number][] = [[group, zoomed]];
  let deepest = boxes[zoomed]!.depth;
  for (let entry = open.pop(); entry; entry = open.pop()) {
    const [above, index] = entry;
    const { depth } = boxes[index]!;
    let at = boxes[index]!.at;
    for (const child of children(above, least)) {
      const own = boxes.push({ func: child.func, depth: depth + 1, at, total: child.total, own: 0, grown: child.grown, parent: index }) - 1;
      deepest = Math.max(deepest, depth + 1);
      open.push([child, own]);
      at += child.total;
    }
    if (index > 0) boxes[index]!.own = above.own;
  }
  return { boxes, width, depth: deepest + 1, zoomed };
}

const widestFirst = (a: Group, b: Group) => b.total - a.total || a.func - b.func;

/** What is beside a box: groups of lines by function, without those that are too narrow to be seen. */
class Grouping {
  /** By function. */
  private readonly totals: Float64Array;
  private readonly groups: (Group | null)[];
  private lines: number[] = [];
  private samples: number[] = [];
  private changes: number[] = [];

  constructor(private readonly model: Model) {
    this.totals = new Float64Array(model.names.length);
    this.groups = new Array<Group | null>(model.names.length).fill(null);
  }

  private func(line: number): number { return line < 0 ? this.model.noPython : this.model.tree.func[line]!; }

  add(line: number, samples: number, change: number): void {
    this.totals[this.func(line)]! += samples;
    this.lines.push(line);
    this.samples.push(samples);
    this.changes.push(change);
  }

  finish(least: number): Group[] {
    const { lines, samples, changes, totals, groups } = this;
    const found: Group[] = [];
    for (let i = 0; i < lines.length; i++) {
      const line = lines[i]!, func = this.func(line), total = totals[func]!;
      if (total < least) continue;
      let group = groups[func];
      if (!group) found.push((group = groups[func] = { func, total, own: 0, grown: 0, lines: [], samples: [], changes: [] }));
      group.grown += changes[i]!;
      group.lines.push(line);
      group.samples.push(samples[i]!);
      group.changes.push(changes[i]!);
    }
    for (const line of lines) totals[this.func(line)] = 0;
    for (const { func } of found) groups[func] = null;
    this.lines = [];
    this.samples = [];
    this.changes = [];
    return found.sort(widestFirst);
  }
}

function callees(model: Model, calls: Calls, { samples, grown }: Weights) {
  const grouping = new Grouping(model);
  return (above: Group, least: number): Group[] => {
    let below = 0;
    const visit = (line: number) => {
      const many = samples.shown(line);
      if (many <= 0) return;
      below += many;
      grouping.add(line, many, grown?.shown(line) ?? 0);
    };
    if (above.func !== ALL) for (const line of above.lines) { if (line >= 0) calls.callees(line, visit); }
    else {
      calls.callees(-1, visit);
      if (!calls.native && samples.withoutPython > 0) grouping.add(-1, samples.withoutPython, grown?.withoutPython ?? 0);
    }
    above.own = Math.max(0, above.total - below);
    return grouping.finish(least);
  };
}

/** A box is what was running; above it who called that. Its own samples are those of stacks that begin there. */
function callers(model: Model, calls: Calls, { samples, grown }: Weights) {
  const grouping = new Grouping(model);
  return (above: Group, least: number): Group[] => {
    if (above.func === ALL) {
      model.data.stacks.forEach((leaf, stack) => {
        if (samples.own[stack]! > 0) grouping.add(calls.innermost(leaf), samples.own[stack]!, grown?.own[stack] ?? 0);
      });
      return grouping.finish(least);
    }
    above.own = 0;
    above.lines.forEach((line, i) => {
      const caller = line < 0 ? -1 : calls.caller(line);
      if (caller < 0) above.own += above.samples[i]!;
      else grouping.add(caller, above.samples[i]!, above.changes[i]!);
    });
    return grouping.finish(least);
  };
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
