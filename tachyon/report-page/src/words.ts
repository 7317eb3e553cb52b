// Numbers and names as people read them.

import type { Model } from "./model";

/** Control characters, and those that change the order in which others are shown. */
const UNSAFE = /[\p{Cc}\p{Cf}\u2028\u2029]/gu;

/** Text of a file, as it can be shown. */
export function shown(text: string): string {
  return text.replaceAll("\t", "    ").replace(UNSAFE, (character) => `\\u{${character.codePointAt(0)!.toString(16)}}`);
}

export function percent(part: number, whole: number): string {
  return whole === 0 ? "0.0 %" : `${((part * 100) / whole).toFixed(1)} %`;
}

/** For sentences: `47 %`, but `0.4 %`. */
export function about(part: number, whole: number): string {
  const share = whole === 0 ? 0 : (part * 100) / whole;
  return share >= 9.95 ? `${share.toFixed(0)} %` : `${share.toFixed(1)} %`;
}

export function count(number: number): string {
  return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function plural(number: number, one: string, many = `${one}s`): string {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function seconds(number: number): string {
  if (number >= 6000) return `${count(number / 60)} min`;
  return number >= 100 ? `${number.toFixed(0)} s` : number >= 1 ? `${number.toFixed(1)} s` : `${(number * 1000).toFixed(0)} ms`;
}

/** `a, b and c`. */
export function listed(parts: string[]): string {
  return parts.length < 2 ? parts.join("") : `${parts.slice(0, -1).join(", ")} and ${parts[parts.length - 1]}`;
}

/** The last of many names of a path. */
export function base(path: string): string {
  return path.slice(path.lastIndexOf("/") + 1);
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
