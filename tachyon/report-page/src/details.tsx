// One function: who calls it, whom it calls, where in it the time goes.

import { useMemo } from "preact/hooks";
import { PYTHON } from "./data";
import { Bar, type Set, Share } from "./hot_spots";
import type { Edge, Model, Row, Sums } from "./model";
import { Missing, Source, sourceOf } from "./source";
import { STATES } from "./states";
import type { Calls } from "./tree";
import { count, percent } from "./words";

/** Most rows of a list. */
const MOST = 50;

export function Details({ model, calls, sums, rows, func, set }: {
  model: Model; calls: Calls; sums: Sums; rows: Row[]; func: number; set: Set;
}) {
  const { callers, callees } = useMemo(() => model.edges(calls, sums, func), [calls, sums, func]);
  const inside = useMemo(() => model.inside(sums, func), [sums, func]);
  const row = rows.find((row) => row.func === func);
  const whole = row?.total ?? 0, own = row?.own ?? 0;
  const waits = STATES.filter(({ id }) => inside.states[id]! > 0).map(({ id, word }) => `${word} ${percent(inside.states[id]!, sums.samples)}`);
  return (
    <section class="details" id="details" aria-label={`function ${model.name(func)}`}>
      <header class="panel-head">
        <h2><code>{model.name(func)}</code> <span class="where" title={model.file(func)}>{model.place(func) || model.file(func)}</span></h2>
        <p class="figures">
          <span>self <b>{percent(own, sums.samples)}</b></span><span>total <b>{percent(whole, sums.samples)}</b></span>
          {waits.map((wait) => <span key={wait}>{wait}</span>)}
        </p>
        <button class="link" title={model.text(model.module(func))} onClick={() => set({ module: model.module(func), zoom: [] })}>only this module</button>
        <button class="close" aria-label="close" title="close (Esc)" onClick={() => set({ selected: null })}>×</button>
      </header>
      <div class="columns">
        <Edges model={model} title="Callers" id="callers" edges={callers} whole={whole} none="none: it is where a thread begins" set={set} />
        <div class="scrolled">
          {model.kind(func) === PYTHON ? <Lines model={model} sums={sums} func={func} set={set} /> : <p class="empty">No Python code: it has no lines here.</p>}
        </div>
        <div class="stacked">
          <Edges model={model} title="Callees" id="callees" edges={callees.filter((edge) => !model.isMark(edge.func))} whole={whole} none="none: it calls nothing" set={set} />
          {inside.native.length > 0 && !model.isMachine(func) &&
            <Edges model={model} title="Native code in its self time" id="natives" edges={inside.native} whole={whole} none="" set={set} />}
        </div>
      </div>
    </section>
  );
}

function Edges({ model, title, id, edges, whole, none, set }: {
  model: Model; title: string; id: string; edges: Edge[]; whole: number; none: string; set: Set;
}) {
  return (
    <section class="scrolled">
      <h3 title="of the samples in the function">{title}</h3>
      <table id={id}><tbody>
        {edges.slice(0, MOST).map((edge) => (
          <tr key={edge.func} data-name={model.names[edge.func]} onClick={() => set({ selected: edge.func })}>
            <Share part={edge.samples} whole={whole} what="edge" />
            <td class="name" title={`${model.names[edge.func]} ${model.file(edge.func)}`}><button class="link">{model.names[edge.func]}</button>
              <Bar own={edge.samples} total={0} waiting={0} whole={whole} /></td>
          </tr>
        ))}
        {edges.length > MOST && <tr><td /><td class="none">and {count(edges.length - MOST)} more</td></tr>}
        {edges.length === 0 && <tr><td class="none">{none}</td></tr>}
      </tbody></table>
    </section>
  );
}

/** The lines of a function: its source text where that is in the file. */
function Lines({ model, sums, func, set }: { model: Model; sums: Sums; func: number; set: Set }) {
  const lines = useMemo(() => model.lines(sums, (other) => other === func).sort((a, b) => a.line - b.line), [sums, func]);
  const file = model.data.document.functions.file[func]!;
  const text = sourceOf(model, file);
  const most = lines.reduce((most, line) => Math.max(most, line.total), 0);
  return (
    <>
      <h3>{text ? "Source" : "Lines"} {text && <button class="link" onClick={() => set({ view: "source", file })}>whole file</button>}</h3>
      {text ? <Source model={model} file={file} func={func} lines={lines} samples={sums.samples} /> : (
        <table id="lines"><thead><tr><th>Self</th><th>Total</th><th>Line</th></tr></thead><tbody>
          {[...lines].sort((a, b) => b.own - a.own || b.total - a.total).map((line) => (
            <tr key={line.line}>
              <Share part={line.own} whole={sums.samples} what="own" /><Share part={line.total} whole={sums.samples} what="total" />
              <td class="name">{line.line || "–"}<Bar own={line.own} total={line.total} waiting={0} whole={most} /></td>
            </tr>
          ))}
        </tbody></table>)}
      {!text && <Missing model={model} file={file} />}
    </>
  );
}
