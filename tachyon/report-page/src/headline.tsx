// Where the time goes, in a sentence, and what the numbers can be trusted for.

import type { Model, Row, Sums } from "./model";
import { STATES, waiting } from "./states";
import { about, count, listed, percent, plural, seconds } from "./words";

const sum = (counts: Record<string, number>) => Object.values(counts).reduce((a, b) => a + b, 0);
const words = (name: string) => name.replaceAll("_", " ");

/** Most functions and causes that the sentence tells. */
const TOLD = 3;

/** The event of what asyncio's tasks await. */
const TASK_WAIT = "task-wait";

/** What the samples are a part of: `of the CPU time`. */
export function whatSamplesAre(model: Model): string {
  const { event } = model.data.document.quality, all = model.everything;
  if (event === TASK_WAIT) return "of the tasks’ waiting time";
  if (!["", "cpu-clock", "cycles"].includes(event)) return `of the ${event} samples`;
  return waiting(all.states) > 0 ? "of the threads’ time" : "of the CPU time";
}

/** What the chosen samples say beside their functions. */
export function facts(model: Model, sums: Sums, filtered: boolean): string[] {
  const { quality, interval_us, seconds: long } = model.data.document;
  const facts: string[] = [];
  const waits = waiting(sums.states), time = (sums.samples * interval_us) / 1e6;
  // What a task awaits is in its stack.
  if (waits > 0 && quality.event !== TASK_WAIT) {
    const causes = STATES.filter(({ id, waits }) => waits && sums.states[id]! > 0)
      .sort((a, b) => sums.states[b.id]! - sums.states[a.id]!).slice(0, TOLD + 1)
      .map(({ id, phrase }) => `${about(sums.states[id]!, sums.samples)} ${phrase}`);
    facts.push(`${about(waits, sums.samples)} waiting: ${listed(causes)}`);
  }
  if (["", "cpu-clock", "cycles", TASK_WAIT].includes(quality.event)) {
    const kind = quality.event === TASK_WAIT ? "tasks’ waiting time" : waits > 0 ? "threads’ time" : "CPU time";
    facts.push(`${count(sums.samples)} samples, ${seconds(time)} of ${kind}${!filtered && long > 0 ? ` in ${seconds(long)}` : ""}`);
  } else facts.push(plural(sums.samples, "sample"));
  const known = sums.states[1]! + sums.states[2]!;
  if (known > 0) facts.push(`GIL held ${about(sums.states[1]!, known)} of the time on a CPU`);
  return facts;
}

export function Headline({ model, sums, rows, filtered, select }: {
  model: Model; sums: Sums; rows: Row[]; filtered: boolean; select(func: number): void;
}) {
  const python = rows.filter((row) => row.own > 0 && !model.isMachine(row.func)).sort((a, b) => b.own - a.own).slice(0, TOLD + 1);
  const [first, ...others] = python;
  const line = first && model.hottest(sums)[first.func];
  const name = (func: number) => <button class="link" title={model.file(func)} onClick={() => select(func)}>{model.name(func)}</button>;
  return (
    <section class="headline" id="answer">
      {first ? <p class="lead">
        <b>{about(first.own, sums.samples)}</b> {whatSamplesAre(model)}{filtered ? " chosen" : ""} is in {name(first.func)}
        {model.place(first.func) && <span class="where"> {model.place(first.func)}{line ? `:${line}` : ""}</span>}
      </p> : <p class="lead">{filtered ? "No sample is left by the filters." : nothing(model)}</p>}
      {first && <p class="facts">
        {others.length > 0 && <span>then {others.map((row, place) => <>{place > 0 ? ", " : ""}{name(row.func)} {about(row.own, sums.samples)}</>)}</span>}
        {facts(model, sums, filtered).map((fact) => <span key={fact}>{fact}</span>)}
      </p>}
    </section>
  );
}

function nothing(model: Model): string {
  return model.data.document.seconds > 0
    ? `No samples: none of its threads ran on a CPU in ${seconds(model.data.document.seconds)}. Recording with --wall shows where they wait.`
    : "No samples.";
}

type Level = "good" | "fair" | "bad" | "plain";
interface Chip { id: string; level: Level; text: string; why: string }

function chips(model: Model): Chip[] {
  const { quality } = model.data.document;
  const lost = sum(quality.loss), all = sum(quality.stops), cut = all - (quality.stops["complete"] ?? 0);
  const merged = sum(quality.merges), failed = quality.merges["failed"] ?? 0, repaired = quality.merges["repaired"] ?? 0;
  const stored = Math.max(1, model.everything.samples);
  const level = (share: number): Level => (share >= 0.05 ? "bad" : share >= 0.01 ? "fair" : "good");
  const found: Chip[] = [];
  const causes = Object.entries(quality.loss).map(([cause, many]) => `${words(cause)}: ${count(many)}`).join(", ");
  if (quality.cut) found.push({ id: "lost", level: "bad", text: "recovered: loss unknown", why: "the recording was cut short" });
  else found.push({ id: "lost", level: level(lost / (lost + stored)), text: lost === 0 ? "nothing lost" : `lost ${percent(lost, lost + stored)}`,
    why: causes || "no sample was lost" });
  if (quality.not_fired) found.push({ id: "not-fired", level: level(quality.not_fired / stored), text: `missed about ${percent(quality.not_fired, quality.not_fired + stored)}`,
    why: `the timer did not fire some ${count(quality.not_fired)} times; the target’s own CPU time tells` });
  if (all > 0) {
    const why = Object.entries(quality.stops).filter(([stop]) => stop !== "complete").map(([stop, many]) => `${words(stop)}: ${count(many)}`).join(", ");
    found.push({ id: "stacks", level: level(cut / all), text: `whole stacks ${percent(all - cut, all)}`, why: why || "every Python stack is whole" });
  }
  if (merged > 0) found.push({ id: "order", level: level(failed / merged), text: `native order known ${percent(merged - failed, merged)}`,
    why: `of native frames among Python’s: ${count(repaired)} repaired, ${count(failed)} without them` });
  if (quality.inconsistent) found.push({ id: "inconsistent", level: "bad", text: `${count(quality.inconsistent)} counts differ`, why: "a defect of the profiler" });
  return found;
}

/** What is not as it should be stands there; all else is a click away. */
export function Quality({ model }: { model: Model }) {
  const { quality } = model.data.document;
  const all = chips(model), odd = all.filter((chip) => chip.level !== "good");
  const notes = [...quality.notes, ...quality.refused];
  const shown = odd.length > 0 ? odd : [{ id: "all", level: "good" as Level, text: all.some((chip) => chip.id === "stacks") ? "complete" : "nothing lost", why: "no sample lost, stacks whole" }];
  return (
    <details class="quality" id="quality">
      <summary title="what the numbers can be trusted for">{shown.map((chip) => <span key={chip.id} class={`chip ${chip.level}`} title={chip.why}>{chip.text}</span>)}</summary>
      <div class="popover">
        <table><tbody>
          {all.map((chip) => <tr key={chip.id}><td><span id={`quality-${chip.id}`} class={`chip ${chip.level}`}>{chip.text}</span></td><td>{chip.why}</td></tr>)}
        </tbody></table>
        {notes.length > 0 && <ul>{notes.map((note) => <li key={note}>{note}</li>)}</ul>}
      </div>
    </details>
  );
}
