// What changed, with what the statistics say of it: the numbers are those of `tachyon-bpf diff --json`.

import { useMemo, useState } from "preact/hooks";
import type { Change, Difference } from "./difference";
import type { Model } from "./model";
import { shown } from "./source";
import { count, matcher, percent, seconds } from "./words";

const STEP = 100;

/** What a function is told by, in a change and in the graph. */
const key = (name: string, file: string | null) => `${name}\n${file ?? ""}`;

export function Verdict({ difference }: { difference: Difference }) {
  const { changes, before, after, by, smallest_visible_share: visible, level } = difference.changes;
  const significant = changes.filter((change) => change.significant).length;
  const tested = changes.filter((change) => change.q !== null).length;
  const rows = by === "line" ? "lines" : by === "module" ? "modules" : "functions";
  const whole = (word: string, { samples, seconds: long, replicates }: typeof before) =>
    `${word}: ${count(samples)} samples in ${seconds(long)}, ${count(replicates)} replicate${replicates === 1 ? "" : "s"}`;
  const lost = difference.quality.map((quality, side) => {
    const lost = Object.values(quality.loss).reduce((a, b) => a + b, 0), stored = [before, after][side]!.samples;
    return quality.cut ? "unknown" : percent(lost, lost + stored);
  });
  return (
    <div class="quality">
      <p id="answer">
        {visible === null ? <b>Nothing can be told: each side must have samples over some seconds, or several recordings.</b>
          : significant === 0 ? <b>No significant change among {count(tested)} {rows}.</b>
          : <b>{count(significant)} significant change{significant === 1 ? "" : "s"} among {count(tested)} {rows}.</b>}
        {visible !== null && ` At most ${(level * 100).toFixed(0)} % of what is called significant is chance. A function with 1 % would have to change by ${(visible * 100).toFixed(2)} points to be seen.`}
      </p>
      <p class="chips">
        <span class="chip">{whole("before", before)}</span><span class="chip">{whole("after", after)}</span>
        <span class="chip" id="quality-lost">lost {lost[0]} before, {lost[1]} after</span>
      </p>
    </div>
  );
}

export function ChangesTable({ model, difference, search, selected, select }: {
  model: Model; difference: Difference; search: string; selected: number | null; select(func: number | null): void;
}) {
  const [most, setMost] = useState(STEP);
  const { changes, per_unit, by } = difference.changes;
  const funcs = useMemo(() => new Map(model.names.map((_, func) => [key(model.name(func), model.file(func)), func])), [model]);
  const matches = useMemo(() => matcher(search), [search]);
  const found = changes.filter((change) => !matches || matches(change.function) || matches(change.file ?? ""));
  const value = (number: number) => (per_unit ? seconds(number) : `${(number * 100).toFixed(2)} %`);
  const signed = (number: number) => `${number < 0 ? "−" : "+"}${per_unit ? seconds(Math.abs(number)) : (Math.abs(number) * 100).toFixed(2)}`;
  const verdict = (change: Change) =>
    change.significant ? (change.change > 0 ? "▲ more" : "▼ less") : change.moved_to !== null ? `moved to ${shown(change.moved_to)}` : change.q === null ? "not tested" : "chance?";
  return (
    <div class="functions">
      <table id="changes">
        <thead><tr>
          <th scope="col">Before</th><th scope="col">After</th>
          <th scope="col" title={per_unit ? "seconds for each unit of work" : "points of the share"}>Change</th>
          <th scope="col" title="has the true change in it in 99 of 100 cases">99 % interval</th>
          <th scope="col" title="q: share of false alarms, when all rows with a q as low are believed">Verdict</th>
          <th scope="col">{by === "module" ? "Module" : "Function"}</th>
        </tr></thead>
        <tbody>
          {found.slice(0, most).map((change, place) => {
            const func = funcs.get(key(change.function, change.file)) ?? null;
            const name = shown(change.function), file = shown(change.file ?? "");
            return (
              <tr key={place} class={`${change.significant ? "significant" : "chance"} ${func !== null && func === selected ? "selected" : ""}`}
                data-significant={String(change.significant)} onClick={() => select(func)}>
                <td>{value(change.before)}</td><td>{value(change.after)}</td>
                <td class={change.significant ? (change.change > 0 ? "more" : "less") : ""}>{signed(change.change)}</td>
                <td>{change.low === null || change.high === null ? "" : `${signed(change.low)} to ${signed(change.high)}`}</td>
                <td title={change.q === null ? "" : `q = ${change.q.toPrecision(2)}`}>{verdict(change)}</td>
                <td class="name" title={`${name} ${file}`}><button class="link">{name}{change.line ? `:${change.line}` : ""}</button></td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {found.length > most && <button onClick={() => setMost(most + 5 * STEP)}>{count(found.length - most)} more</button>}
      {found.length === 0 && <p>Nothing{search ? " matches" : ""}.</p>}
    </div>
  );
}
