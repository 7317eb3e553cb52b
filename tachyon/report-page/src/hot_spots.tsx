// The functions, hottest first: where the time goes, in a table.

import { useMemo, useState } from "preact/hooks";
import type { Model, Row, Sums } from "./model";
import type { State } from "./place";
import { count, percent } from "./words";

export type Set = (change: Partial<State>) => void;
const STEP = 60;

/** A share of samples, with how many they are. */
export function Share({ part, whole, what }: { part: number; whole: number; what: string }) {
  return <td class="share" title={`${count(part)} samples`} data-samples={part} data-what={what}>{percent(part, whole)}</td>;
}

/** Self and, paler, total of all samples; of self, what waited in grey. */
export function Bar({ own, total, waiting, whole }: { own: number; total: number; waiting: number; whole: number }) {
  const wide = (part: number) => ({ width: `${((part * 100) / Math.max(1, whole)).toFixed(2)}%` });
  return (
    <span class="bar" aria-hidden>
      <i class="total" style={wide(total)} /><i class="waits" style={wide(own)} /><i class="own" style={wide(own - waiting)} />
    </span>
  );
}

export function HotSpots({ model, rows, sums, found, state, hasNative, set }: {
  model: Model; rows: Row[]; sums: Sums; found: Uint8Array | null; state: State; hasNative: boolean; set: Set;
}) {
  const { sort, selected, nativeRows } = state;
  const [most, setMost] = useState(STEP);
  const shown = useMemo(() => {
    // What is looked for is shown, whatever it is.
    const shown = rows.filter((row) => (found ? found[row.func] === 1 : nativeRows || !model.isMachine(row.func)));
    const names = (a: Row, b: Row) => (model.names[a.func]! < model.names[b.func]! ? -1 : 1);
    const orders: Record<State["sort"], (a: Row, b: Row) => number> = {
      own: (a, b) => b.own - a.own || b.total - a.total || names(a, b),
      total: (a, b) => b.total - a.total || b.own - a.own || names(a, b),
      name: names,
    };
    return shown.sort(orders[sort]);
  }, [rows, found, sort, nativeRows]);
  const visible = shown.slice(0, most);
  const hottest = model.hottest(sums);
  const head = (key: State["sort"], word: string, title: string) => (
    <th scope="col" aria-sort={sort === key ? (key === "name" ? "ascending" : "descending") : "none"}>
      <button title={title} onClick={() => set({ sort: key })}>{word}{sort === key ? (key === "name" ? " ▲" : " ▼") : ""}</button>
    </th>
  );
  return (
    <section class="functions" aria-label="hot spots">
      <header class="panel-head">
        <h2>Hot spots</h2>
        {hasNative && <label title="native functions have rows, too; their time is a part of the Python rows'">
          <input id="native-rows" type="checkbox" checked={nativeRows} onChange={() => set({ nativeRows: !nativeRows })} /> native rows</label>}
      </header>
      <div class="scrolled">
        <table id="functions">
          <thead><tr>
            {head("own", "Self", "in the function itself and in native code that it called")}
            {head("total", "Total", "in the function and in all that it called")}
            {head("name", "Function", "by name")}
          </tr></thead>
          <tbody>
            {visible.map((row) => {
              const { func, own, total, waiting } = row, line = hottest[func], place = model.place(func);
              return (
                <tr key={func} class={func === selected ? "selected" : ""} data-kind={model.kind(func)} data-name={model.names[func]}
                  onClick={() => set({ selected: func })}>
                  <Share part={own} whole={sums.samples} what="own" />
                  <Share part={total} whole={sums.samples} what="total" />
                  <td class="name" title={`${model.names[func]} ${model.file(func)}`}>
                    <button class="link">{model.name(func)}</button>
                    <span class="where">{place}{place && line ? `:${line}` : ""}</span>
                    <Bar own={own} total={total} waiting={waiting} whole={sums.samples} />
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
        {shown.length > most && <button class="more-rows" onClick={() => setMost(most + 5 * STEP)}>{count(shown.length - most)} more functions</button>}
        {shown.length === 0 && <p class="empty">{sums.samples === 0 ? "No samples here." : found ? "No function matches the search." : "No Python function has samples."}</p>}
      </div>
    </section>
  );
}
