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

/** What a search means: a regular expression, or plain text where it is none. `null`: no search. */
export function matcher(search: string): ((text: string) => boolean) | null {
  if (search === "") return null;
  const flags = /[A-Z]/.test(search) ? "u" : "iu";
  try {
    const pattern = new RegExp(search, flags);
    return (text) => pattern.test(text);
  } catch {
    // An unfinished expression is text.
    return (text) => text.includes(search);
  }
}

/** The functions that a search means. */
export function finder(model: Model, search: string): Uint8Array | null {
  const matches = matcher(search);
  return matches && Uint8Array.from(model.names, (name, func) => (matches(name) || matches(model.file(func)) ? 1 : 0));
}
