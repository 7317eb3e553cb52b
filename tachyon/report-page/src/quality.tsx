// Where the time goes in one line, and what the numbers can be trusted for.

import type { Model, Row, Sums } from "./model";
import { count, percent, seconds } from "./words";

const sum = (counts: Record<string, number>) => Object.values(counts).reduce((a, b) => a + b, 0);
const words = (name: string) => name.replaceAll("_", " ");

export function Quality({ model, sums, rows, filtered, select }: {
  model: Model; sums: Sums; rows: Row[]; filtered: boolean; select(func: number): void;
}) {
  const { quality, interval_us } = model.data.document;
  const lost = sum(quality.loss), all = sum(quality.stops), cut = all - (quality.stops["complete"] ?? 0);
  const merged = sum(quality.merges), failed = quality.merges["failed"] ?? 0, repaired = quality.merges["repaired"] ?? 0;
  const known = sums.states[1]! + sums.states[2]! + sums.states[3]!;
  const python = rows.filter((row) => row.own > 0 && !model.isMachine(row.func)).sort((a, b) => b.own - a.own).slice(0, 4);
  const stored = Math.max(1, model.samples);
  const level = (share: number) => (share >= 0.05 ? "bad" : share >= 0.01 ? "fair" : "good");
  const chips: [string, string, string, string][] = [];
  const chip = (id: string, kind: string, text: string, why: string) => chips.push([id, kind, text, why]);
  const causes = Object.entries(quality.loss).map(([cause, many]) => `${words(cause)}: ${count(many)}`).join(", ");
  if (quality.cut) chip("lost", "bad", "recovered: loss unknown", "the recording was cut short");
  else chip("lost", level(lost / (lost + stored)), `lost ${percent(lost, lost + stored)}`, causes || "no sample was lost");
  if (quality.not_fired) chip("not-fired", level(quality.not_fired / stored), `about ${count(quality.not_fired)} not taken`, "the timer did not fire; the target's own CPU time tells");
  if (all > 0) {
    const why = Object.entries(quality.stops).filter(([stop]) => stop !== "complete").map(([stop, many]) => `${words(stop)}: ${count(many)}`).join(", ");
    chip("stacks", level(cut / all), `whole stacks ${percent(all - cut, all)}`, why || "every Python stack is whole");
  }
  if (merged > 0) chip("order", level(failed / merged), `native order known ${percent(merged - failed, merged)}`,
    `${count(repaired)} repaired, ${count(failed)} without the native frames between Python frames`);
  if (known > 0) chip("gil", "plain", `GIL held ${percent(sums.states[1]!, known)}`, "of the samples of which it is known");
  if (quality.inconsistent) chip("inconsistent", "bad", `${count(quality.inconsistent)} counts differ`, "a defect of the profiler");
  const notes = [...quality.notes, ...quality.refused];
  return (
    <div class="quality">
      <p id="answer">
        <b>{count(sums.samples)} samples</b>{filtered ? " chosen" : ""}, {seconds((sums.samples * interval_us) / 1e6)} of threads' time.
        {python.length > 0 && " Most in "}
        {python.map((row, place) => (
          <span key={row.func}>{place > 0 && ", "}<button class="link" onClick={() => select(row.func)}>{model.names[row.func]}</button> <b>{percent(row.own, sums.samples)}</b></span>))}
        {python.length > 0 && "."}
      </p>
      <p class="chips">
        {chips.map(([id, kind, text, why]) => <span key={id} id={`quality-${id}`} class={`chip ${kind}`} title={why}>{text}</span>)}
        {notes.length > 0 && <details><summary>{notes.length} notes</summary><ul>{notes.map((note) => <li key={note}>{note}</li>)}</ul></details>}
      </p>
    </div>
  );
}
