// What is shown, as the address's fragment keeps it: a link leads to the same place.

import type { Colouring, Layout } from "./graph";

export type View = "graph" | "source" | "threads";

export interface State {
  view: View;
  layout: Layout;
  colouring: Colouring;
  native: boolean;
  search: string;
  process: number | null;
  thread: number | null;
  /** A task's function. */
  task: number | null;
  module: number | null;
  /** What threads did. */
  state: number | null;
  range: [number, number] | null;
  zoom: number[];
  selected: number | null;
  /** The file whose source is shown, by the index of its name. */
  file: number | null;
  sort: "own" | "total" | "name";
  /** Native functions have rows of their own. */
  nativeRows: boolean;
}

export const START: State = {
  view: "graph", layout: "icicle", colouring: "kind", native: true, search: "", process: null, thread: null, task: null, module: null,
  state: null, range: null, zoom: [], selected: null, file: null, sort: "own", nativeRows: false,
};

/** `usual`: the colouring without a word in the link. */
export function toFragment(state: State, usual: Colouring): string {
  const words = new URLSearchParams();
  const put = (key: string, value: string | number | null) => { if (value !== null && value !== "") words.set(key, String(value)); };
  if (state.view !== START.view) put("show", state.view);
  if (state.layout !== START.layout) put("view", state.layout);
  if (state.colouring !== usual) put("colour", state.colouring);
  if (!state.native) put("native", 0);
  put("search", state.search);
  put("process", state.process);
  put("thread", state.thread);
  put("task", state.task);
  put("module", state.module);
  put("state", state.state);
  if (state.range) put("time", state.range.join("-"));
  put("zoom", state.zoom.join("."));
  put("function", state.selected);
  put("file", state.file);
  if (state.sort !== START.sort) put("sort", state.sort);
  if (state.nativeRows) put("rows", "all");
  return words.toString();
}

export interface Limits { functions: number; processes: number; threads: number; strings: number; buckets: number; states: number }

/** Whoever made the link, only what this report has is taken from it. */
export function fromFragment(fragment: string, usual: Colouring, most: Limits): State {
  const words = new URLSearchParams(fragment.replace(/^#/, ""));
  const number = (text: string | null | undefined, below: number): number | null =>
    text && /^\d{1,10}$/.test(text) && Number(text) < below ? Number(text) : null;
  const one = <T extends string>(key: string, of: readonly T[], otherwise: T): T =>
    of.find((word) => word === words.get(key)) ?? otherwise;
  const [from, to] = (words.get("time") ?? "").split("-").map((text) => number(text, most.buckets + 1));
  const zoom = (words.get("zoom") ?? "").split(".").map((text) => number(text, most.functions));
  const colourings: Colouring[] = ["kind", "self", "total", "module"];
  return {
    view: one("show", ["graph", "source", "threads"], START.view),
    layout: one("view", ["flame", "icicle", "inverted"], START.layout),
    colouring: one("colour", usual === "change" ? [...colourings, "change"] : colourings, usual),
    native: words.get("native") !== "0",
    search: words.get("search") ?? "",
    process: number(words.get("process"), most.processes),
    thread: number(words.get("thread"), most.threads),
    task: number(words.get("task"), most.functions),
    module: number(words.get("module"), most.strings),
    state: number(words.get("state"), most.states),
    range: from != null && to != null && from < to ? [from, to] : null,
    zoom: zoom.every((func) => func !== null) ? zoom as number[] : [],
    selected: number(words.get("function"), most.functions),
    file: number(words.get("file"), most.strings),
    sort: one("sort", ["own", "total", "name"], START.sort),
    nativeRows: words.get("rows") === "all",
  };
}
