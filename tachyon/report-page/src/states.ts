// What a thread did when a sample was taken: it ran, with the GIL or without it, or it waited, for something.

import { HELD, NOT_HELD, RAN, WAITED } from "./data";

export interface State {
  /** Number of the state in sums. */
  id: number;
  /** As lists call it: `waits for a lock`. */
  word: string;
  /** As legends call it, below `running` or `waiting`: `lock`. */
  short: string;
  /** As sentences call it: `34 % for a CPU`. */
  phrase: string;
  colour: string;
  waits: boolean;
}

/** What can be waited for (docs/waiting.md). The innermost frame of a wait is `<waiting: CAUSE>`. */
const CAUSES: [cause: string, short: string, word: string, phrase: string, colour: string][] = [
  ["gil", "GIL", "waits for the GIL", "for the GIL", "#d55e00"],
  ["cpu", "CPU", "waits for a CPU", "for a CPU", "#e69f00"],
  ["lock", "lock", "waits for a lock", "for a lock", "#cc79a7"],
  ["disk", "disk", "waits for a disk", "for a disk", "#b59f00"],
  ["socket", "socket", "waits for a socket", "for a socket", "#009e73"],
  ["pipe", "pipe", "waits for a pipe", "for a pipe", "#7fcfb5"],
  ["poll", "poll", "polls", "in a poll", "#a5a8ad"],
  ["sleep", "sleep", "sleeps", "asleep", "#c9ccd1"],
  ["child", "child process", "waits for a child process", "for a child process", "#9d8ac7"],
  ["stop_the_world", "stop of the world", "waits while the world is stopped", "while the world is stopped", "#7a5c3e"],
  ["other", "other", "waits for something else", "for something else", "#8a8d93"],
];

const FIRST_CAUSE = 4;

/** From the bottom of the time line to its top. */
export const STATES: State[] = [
  { id: HELD, word: "holds the GIL", short: "with the GIL", phrase: "with the GIL", colour: "#0072b2", waits: false },
  { id: NOT_HELD, word: "runs without the GIL", short: "without it", phrase: "without the GIL", colour: "#56b4e9", waits: false },
  { id: RAN, word: "runs", short: "on a CPU", phrase: "on a CPU", colour: "#0072b2", waits: false },
  ...CAUSES.map(([, short, word, phrase, colour], place) => ({ id: FIRST_CAUSE + place, short, word, phrase, colour, waits: true })),
  { id: WAITED, word: "waits", short: "unknown", phrase: "for something unknown", colour: "#b0b3b8", waits: true },
];

/** How many numbers of states there are. */
export const STATE_COUNT = FIRST_CAUSE + CAUSES.length;

const WAITS = Uint8Array.from({ length: STATE_COUNT }, (_, id) => (id === WAITED || id >= FIRST_CAUSE ? 1 : 0));

export function isWait(state: number): boolean {
  return WAITS[state] === 1;
}

export function stateOf(id: number): State {
  return STATES.find((state) => state.id === id)!;
}

/** The state that a function of this name stands for; -1: none. */
export function stateOfMark(name: string): number {
  const cause = /^<waiting: (.+)>$/.exec(name)?.[1];
  if (cause === undefined) return -1;
  const place = CAUSES.findIndex(([known]) => known === cause);
  return FIRST_CAUSE + (place < 0 ? CAUSES.length - 1 : place);
}

/** Of sums by state: those of waits. */
export function waiting(states: ArrayLike<number>): number {
  let sum = 0;
  for (let id = 0; id < STATE_COUNT; id++) if (WAITS[id]) sum += states[id]!;
  return sum;
}
