// The table of functions, and one function with its callers, callees and lines.

import { useMemo, useState } from "preact/hooks";
import { PYTHON } from "./data";
import type { Edge, Model, Row, Sums, Tree } from "./model";
import type { State } from "./place";
import { hasSource, Source } from "./source";
import { count, percent } from "./words";

type Set = (change: Partial<State>) => void;
const STEP = 60;

function Share({ part, whole, what }: { part: number; whole: number; what: string }) {
  return (
    <td class="share" title={`${count(part)} samples`} data-samples={part} data-what={what}>
      <meter min={0} max={Math.max(1, whole)} value={part} aria-hidden /> {percent(part, whole)}
    </td>
  );
}

export function Functions({ model, rows, samples, found, sort, selected, set }: {
  model: Model; rows: Row[]; samples: number; found: Uint8Array | null; sort: State["sort"]; selected: number | null; set: Set;
}) {
  const [most, setMost] = useState(STEP);
  const shown = useMemo(() => {
    const shown = found ? rows.filter((row) => found[row.func]) : [...rows];
    const names = (a: Row, b: Row) => (model.names[a.func]! < model.names[b.func]! ? -1 : 1);
    const orders: Record<State["sort"], (a: Row, b: Row) => number> = {
      own: (a, b) => b.own - a.own || b.total - a.total || names(a, b),
      total: (a, b) => b.total - a.total || b.own - a.own || names(a, b),
      name: names,
    };
    return shown.sort(orders[sort]);
  }, [rows, found, sort]);
  const head = (key: State["sort"], word: string, title: string) => (
    <th scope="col" aria-sort={sort === key ? (key === "name" ? "ascending" : "descending") : "none"}>
      <button title={title} onClick={() => set({ sort: key })}>{word}{sort === key ? (key === "name" ? " ▲" : " ▼") : ""}</button>
    </th>
  );
  return (
    <div class="functions">
      <table id="functions">
        <thead><tr>
          {head("own", "Self", "in the function itself and in native code that it called")}
          {head("total", "Total", "in the function and in all that it called")}
          {head("name", "Function", "")}
        </tr></thead>
        <tbody>
          {shown.slice(0, most).map((row) => (
            <tr key={row.func} class={row.func === selected ? "selected" : ""} data-kind={model.kind(row.func)}
              onClick={() => set({ selected: row.func })}>
              <Share part={row.own} whole={samples} what="own" />
              <Share part={row.total} whole={samples} what="total" />
              <td class="name" title={`${model.names[row.func]} ${model.file(row.func)}`}><button class="link">{model.names[row.func]}</button></td>
            </tr>
          ))}
        </tbody>
      </table>
      {shown.length > most && <button onClick={() => setMost(most + 5 * STEP)}>{count(shown.length - most)} more</button>}
      {shown.length === 0 && <p>No function{found ? " matches" : ""}.</p>}
    </div>
  );
}

export function Details({ model, tree, total, sums, rows, func, set }: {
  model: Model; tree: Tree; total: Float64Array; sums: Sums; rows: Row[]; func: number; set: Set;
}) {
  const { callers, callees } = useMemo(() => model.edges(tree, total, func), [tree, total, func]);
  const lines = useMemo(() => model.lines(sums, func), [sums, func]);
  const row = rows.find((row) => row.func === func);
  const whole = row?.total ?? 0;
  const list = (title: string, id: string, edges: Edge[]) => (
    <section>
      <h3>{title}</h3>
      <table id={id}><tbody>
        {edges.slice(0, 50).map((edge) => (
          <tr key={edge.func} onClick={() => set({ selected: edge.func })}>
            <Share part={edge.samples} whole={whole} what="edge" />
            <td class="name" title={`${model.names[edge.func]} ${model.file(edge.func)}`}><button class="link">{model.names[edge.func]}</button></td>
          </tr>
        ))}
        {edges.length === 0 && <tr><td class="none">none</td></tr>}
      </tbody></table>
    </section>
  );
  return (
    <div class={hasSource(model, func) ? "details wide" : "details"} id="details">
      <h2>{model.names[func]} <button aria-label="close" onClick={() => set({ selected: null })}>×</button></h2>
      <p class="file">{[...new Set([model.file(func), model.text(model.module(func))])].filter((text) => text && text !== model.names[func]).join(" · ")}
        {" · "}self {percent(row?.own ?? 0, sums.samples)}, total {percent(whole, sums.samples)}
        {" · "}<button class="link" onClick={() => set({ module: model.module(func), zoom: [] })}>only this module</button></p>
      <div class="lists">
        {list("Callers", "callers", callers)}
        {list("Callees", "callees", callees)}
        <section>
          <h3>Lines</h3>
          <table id="lines"><thead><tr><th>Self</th><th>Total</th><th>Line</th></tr></thead><tbody>
            {lines.map((line) => (
              <tr key={line.line}>
                <Share part={line.own} whole={whole} what="own" /><Share part={line.total} whole={whole} what="total" />
                <td class="name">{line.line || "–"}</td>
              </tr>
            ))}
          </tbody></table>
        </section>
      </div>
      {model.kind(func) === PYTHON && <Source model={model} func={func} lines={lines} samples={sums.samples} />}
    </div>
  );
}
