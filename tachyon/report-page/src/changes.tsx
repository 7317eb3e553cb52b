// What changed, with what the statistics say of it: the numbers are those of `tachyon-bpf diff --json`.

import { useMemo, useState } from "preact/hooks";
import { type Change, changedEdges, type ChangedEdge, type Difference } from "./difference";
import type { Set } from "./hot_spots";
import type { Model, Sums } from "./model";
import type { Calls } from "./tree";
import { base, count, matcher, percent, plural, seconds, shown } from "./words";

const STEP = 100;
/** Most rows of a list. */
const MOST = 50;

/** What a function is told by, in a change and in the graph. */
const key = (name: string, file: string | null) => `${name}\n${file ?? ""}`;

const share = (number: number) => `${(number * 100).toFixed(2)} %`;
const points = (number: number) => `${number < 0 ? "−" : "+"}${(Math.abs(number) * 100).toFixed(2)}`;

export function Verdict({ difference, select }: { difference: Difference; select(change: Change): void }) {
  const { changes, before, after, by, smallest_visible_share: visible, level } = difference.changes;
  const significant = changes.filter((change) => change.significant);
  const tested = changes.filter((change) => change.q !== null).length;
  const rows = by === "line" ? "lines" : by === "module" ? "modules" : "functions";
  const more = significant.filter((change) => change.change > 0), less = significant.filter((change) => change.change < 0);
  const names = (changes: Change[]) => changes.slice(0, 3).map((change, place) => (
    <>{place > 0 ? ", " : ""}<button class="link" onClick={() => select(change)}>{shown(change.function)}</button></>));
  const side = (changes: Change[], word: string) => changes.length > 0 &&
    <span>{word}: {names(changes)}{changes.length > 3 ? ` and ${count(changes.length - 3)} more` : ""}</span>;
  return (
    <section class="headline" id="answer">
      <p class="lead">
        {visible === null ? <b>Nothing can be told: each side must have samples over some seconds, or several recordings.</b>
          : significant.length === 0 ? <b>No significant change</b> : <b>{plural(significant.length, "significant change")}</b>}
        {visible !== null && ` among ${count(tested)} ${rows}`}
      </p>
      <p class="facts">
        {side(more, difference.changes.per_unit ? "cost more" : "larger share")}{side(less, difference.changes.per_unit ? "cost less" : "smaller share")}
        {visible !== null && <span title={`at most ${(level * 100).toFixed(0)} % of what is called significant is chance`}>
          a function with 1 % would have to change by {(visible * 100).toFixed(2)} points to be seen</span>}
        {[["before", before], ["after", after]].map(([word, { samples, seconds: long, replicates }]: any) =>
          <span key={word} title={`cut into ${plural(replicates, "replicate")} to see what is chance`}>{word}: {count(samples)} samples in {seconds(long)}</span>)}
      </p>
    </section>
  );
}

/** What was lost on each side. */
export function Losses({ difference }: { difference: Difference }) {
  const { before, after } = difference.changes;
  const lost = difference.quality.map((quality, side) => {
    const lost = Object.values(quality.loss).reduce((a, b) => a + b, 0), stored = [before, after][side]!.samples;
    return { text: quality.cut ? "unknown" : percent(lost, lost + stored), bad: quality.cut || lost / Math.max(1, lost + stored) >= 0.01 };
  });
  const bad = lost.some((side) => side.bad);
  return <span class={`chip ${bad ? "fair" : "good"}`} id="quality-lost">{bad || lost.some((side) => side.text !== "0.0 %")
    ? `lost ${lost[0]!.text} before, ${lost[1]!.text} after` : "nothing lost"}</span>;
}

/** The interval of a change on a scale that all rows share; its middle is no change. */
function Interval({ low, high, change, reach }: { low: number; high: number; change: number; reach: number }) {
  const at = (number: number) => 50 + (50 * Math.max(-reach, Math.min(reach, number))) / reach;
  return (
    <span class="interval" aria-hidden>
      <i class="none" /><i class="range" style={{ left: `${at(low)}%`, width: `${at(high) - at(low)}%` }} /><i class="point" style={{ left: `${at(change)}%` }} />
    </span>
  );
}

export function ChangesTable({ model, difference, search, selected, set }: {
  model: Model; difference: Difference; search: string; selected: number | null; set: Set;
}) {
  const [most, setMost] = useState(STEP);
  const { changes, per_unit, by } = difference.changes;
  const funcs = useMemo(() => functionsByKey(model), [model]);
  const matches = useMemo(() => matcher(search), [search]);
  // What only moved comes last.
  const found = useMemo(() => {
    const found = changes.filter((change) => !matches || matches(change.function) || matches(change.file ?? ""));
    return [...found.filter((change) => !change.only_moved), ...found.filter((change) => change.only_moved)];
  }, [changes, matches]);
  const reach = useMemo(() => {
    const told = changes.filter((change) => change.significant).slice(0, 30);
    return Math.max(1e-9, ...(told.length > 0 ? told : changes.slice(0, 10)).flatMap(({ low, high }) => [Math.abs(low ?? 0), Math.abs(high ?? 0)]));
  }, [changes]);
  const value = (number: number) => (per_unit ? seconds(number) : share(number));
  const signed = (number: number) => (per_unit ? `${number < 0 ? "−" : "+"}${seconds(Math.abs(number))}` : points(number));
  const verdict = (change: Change) =>
    change.significant ? (change.change > 0 ? "▲ more" : "▼ less") : change.moved_to !== null ? `moved to ${shown(change.moved_to)}`
      : change.only_moved ? (change.change > 0 ? "moved here" : "moved") : change.q === null ? "not tested" : "chance?";
  return (
    <section class="functions" aria-label="changes">
      <header class="panel-head"><h2>Changes</h2><span class="dim">{per_unit ? "CPU time for each unit of work" : "shares, and points that they changed by"}</span></header>
      <div class="scrolled">
        <table id="changes">
          <thead><tr>
            <th scope="col">Change</th><th scope="col">Before</th><th scope="col">After</th>
            <th scope="col">{by === "module" ? "Module" : "Function"}</th>
          </tr></thead>
          <tbody>
            {found.slice(0, most).map((change, place) => {
              const func = funcs.get(key(change.function, change.file)) ?? null;
              const name = shown(change.function), file = shown(change.file ?? "");
              const interval = change.low === null || change.high === null ? "" : `99 % interval ${signed(change.low)} to ${signed(change.high)}`;
              return (
                <tr key={place} class={`${change.significant ? "significant" : "chance"} ${func !== null && func === selected ? "selected" : ""}`}
                  data-significant={String(change.significant)} data-name={name} onClick={() => set({ selected: func })}>
                  <td class={`share ${change.significant ? (change.change > 0 ? "more" : "less") : ""}`}>{signed(change.change)}</td>
                  <td class="share">{value(change.before)}</td><td class="share">{value(change.after)}</td>
                  <td class="name" title={`${name} ${file}${interval && `: ${interval}`}${change.q === null ? "" : `, q = ${change.q.toPrecision(2)}`}`}>
                    <button class="link">{name}{change.line ? `:${change.line}` : ""}</button>
                    <span class="where">{base(file)} <span class="verdict">{verdict(change)}</span></span>
                    {change.low !== null && change.high !== null && <Interval low={change.low} high={change.high} change={change.change} reach={reach} />}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
        {found.length > most && <button class="more-rows" onClick={() => setMost(most + 5 * STEP)}>{count(found.length - most)} more</button>}
        {found.length === 0 && <p class="empty">Nothing{search ? " matches the search" : " changed: both sides are empty"}.</p>}
      </div>
    </section>
  );
}

/** Functions of the graph, by what a change calls them. */
function functionsByKey(model: Model): Map<string, number> {
  return new Map(model.names.map((_, func) => [key(model.name(func), model.file(func)), func]));
}

/** The function of a change; `null`: it is none of the graph's. */
export function functionOf(model: Model, change: Change): number | null {
  return functionsByKey(model).get(key(change.function, change.file)) ?? null;
}

/** One function: its callers and callees before and after. */
export function ChangeDetails({ model, calls, sides, difference, func, set }: {
  model: Model; calls: Calls; sides: [Sums, Sums]; difference: Difference; func: number; set: Set;
}) {
  const { callers, callees } = useMemo(() => changedEdges(model, calls, sides, func), [calls, sides, func]);
  const change = difference.changes.changes.find((change) => key(change.function, change.file) === key(model.name(func), model.file(func)));
  const list = (title: string, id: string, edges: ChangedEdge[]) => (
    <section class="scrolled">
      <h3 title="shares of all samples, before and after">{title}</h3>
      <table id={id}>
        <thead><tr><th>Change</th><th>Before</th><th>After</th><th>Function</th></tr></thead>
        <tbody>
          {edges.slice(0, MOST).map(({ func, before, after }) => (
            <tr key={func} data-name={model.names[func]} onClick={() => set({ selected: func })}>
              <td class={`share ${after > before ? "more" : after < before ? "less" : ""}`}>{points(after - before)}</td>
              <td class="share">{share(before)}</td><td class="share">{share(after)}</td>
              <td class="name" title={`${model.names[func]} ${model.file(func)}`}><button class="link">{model.names[func]}</button></td>
            </tr>
          ))}
          {edges.length === 0 && <tr><td class="none" colSpan={4}>none</td></tr>}
        </tbody>
      </table>
    </section>
  );
  return (
    <section class="details" id="details" aria-label={`function ${model.name(func)}`}>
      <header class="panel-head">
        <h2><code>{model.name(func)}</code> <span class="where" title={model.file(func)}>{model.place(func) || model.file(func)}</span></h2>
        {change && !difference.changes.per_unit && <p class="figures">
          <span>self <b>{share(change.before)}</b> → <b>{share(change.after)}</b></span>
          {change.low !== null && change.high !== null && <span>99 % interval {points(change.low)} to {points(change.high)} points</span>}
          {change.moved_to && <span>moved to {shown(change.moved_to)}</span>}
        </p>}
        <button class="close" aria-label="close" title="close (Esc)" onClick={() => set({ selected: null })}>×</button>
      </header>
      <div class="columns two">{list("Callers", "callers", callers)}{list("Callees", "callees", callees)}</div>
    </section>
  );
}
