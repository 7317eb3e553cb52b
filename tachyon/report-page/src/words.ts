// Numbers and names as people read them.

import type { Model } from "./model";

export function percent(part: number, whole: number): string {
  return whole === 0 ? "0.0 %" : `${((part * 100) / whole).toFixed(1)} %`;
}

export function count(number: number): string {
  return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function seconds(number: number): string {
  return number >= 100 ? `${number.toFixed(0)} s` : number >= 1 ? `${number.toFixed(1)} s` : `${(number * 1000).toFixed(0)} ms`;
}

/** The functions that a search means: a regular expression, or plain text where it is none. `null`: no search. */
export function finder(model: Model, search: string): Uint8Array | null {
  if (search === "") return null;
  const found = new Uint8Array(model.names.length);
  const flags = /[A-Z]/.test(search) ? "u" : "iu";
  let pattern: RegExp | null = null;
  try {
    pattern = new RegExp(search, flags);
  } catch {
    // An unfinished expression is text.
  }
  model.names.forEach((name, func) => {
    found[func] = (pattern ? pattern.test(name) || pattern.test(model.file(func)) : name.includes(search)) ? 1 : 0;
  });
  return found;
}
