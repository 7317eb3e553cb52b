// What is shown, as the address's fragment keeps it: a link leads to the same place.

import type { Colouring, Layout } from "./graph";

export interface State {
  layout: Layout;
  colouring: Colouring;
  native: boolean;
  search: string;
  process: number | null;
  thread: number | null;
  module: number | null;
  range: [number, number] | null;
  zoom: number[];
  selected: number | null;
  sort: "own" | "total" | "name";
}

export const START: State = {
  layout: "icicle", colouring: "kind", native: true, search: "", process: null, thread: null, module: null, range: null,
  zoom: [], selected: null, sort: "own",
};

/** `usual`: the colouring without a word in the link. */
export function toFragment(state: State, usual: Colouring): string {
  const words = new URLSearchParams();
  const put = (key: string, value: string | number | null) => { if (value !== null && value !== "") words.set(key, String(value)); };
  if (state.layout !== START.layout) put("view", state.layout);
  if (state.colouring !== usual) put("colour", state.colouring);
  if (!state.native) put("native", 0);
  put("search", state.search);
  put("process", state.process);
  put("thread", state.thread);
  put("module", state.module);
  if (state.range) put("time", state.range.join("-"));
  put("zoom", state.zoom.join("."));
  put("function", state.selected);
  if (state.sort !== START.sort) put("sort", state.sort);
  return words.toString();
}

/** Whoever made the link, only what this report has is taken from it. */
export function fromFragment(fragment: string, usual: Colouring, most: { functions: number; processes: number; threads: number; strings: number; buckets: number }): State {
  const words = new URLSearchParams(fragment.replace(/^#/, ""));
  const number = (text: string | null | undefined, below: number): number | null =>
    text && /^\d{1,10}$/.test(text) && Number(text) < below ? Number(text) : null;
  const one = <T extends string>(key: string, of: readonly T[], otherwise: T): T =>
    of.find((word) => word === words.get(key)) ?? otherwise;
  const [from, to] = (words.get("time") ?? "").split("-").map((text) => number(text, most.buckets + 1));
  const zoom = (words.get("zoom") ?? "").split(".").map((text) => number(text, most.functions));
  return {
    layout: one("view", ["flame", "icicle", "inverted"], START.layout),
    colouring: one("colour", usual === "change" ? ["kind", "self", "module", "change"] : ["kind", "self", "module"], usual),
    native: words.get("native") !== "0",
    search: words.get("search") ?? "",
    process: number(words.get("process"), most.processes),
    thread: number(words.get("thread"), most.threads),
    module: number(words.get("module"), most.strings),
    range: from != null && to != null && from < to ? [from, to] : null,
    zoom: zoom.every((func) => func !== null) ? zoom as number[] : [],
    selected: number(words.get("function"), most.functions),
    sort: one("sort", ["own", "total", "name"], START.sort),
  };
}
