// The flame graph on a canvas that is as large as what can be seen of it, and what the pointer is on.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { ALL, type Boxes, type Colouring, hit, type Layout, paint, row, ROW } from "./graph";
import type { Model } from "./model";

interface Props {
  model: Model;
  all: string;
  boxes: Boxes;
  layout: Layout;
  colouring: Colouring;
  found: Uint8Array | null;
  selected: number | null;
  current: number;
  dark: boolean;
  /** What is told of a box beside its name. */
  tell(index: number): string;
  setCurrent(index: number): void;
  setWidth(pixels: number): void;
  zoomTo(index: number): void;
}

export function Graph(props: Props) {
  const { model, all, boxes, layout, colouring, found, selected, current, dark, tell, setCurrent, setWidth, zoomTo } = props;
  const frame = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [size, setSize] = useState<[number, number]>([800, 400]);
  const [top, setTop] = useState(0);
  const [pointer, setPointer] = useState<{ index: number; x: number; y: number } | null>(null);
  const [width, height] = size;
  const whole = Math.max(boxes.depth * ROW, height);

  useLayoutEffect(() => {
    const measure = () => {
      const { clientWidth, clientHeight } = frame.current!;
      setSize([clientWidth, clientHeight]);
      setWidth(clientWidth);
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(frame.current!);
    return () => observer.disconnect();
  }, []);
  // Where the roots are.
  useLayoutEffect(() => { frame.current!.scrollTop = layout === "flame" ? whole : 0; }, [layout, whole]);
  useEffect(() => {
    const box = boxes.boxes[current];
    if (!box || document.activeElement !== canvas.current) return;
    const y = row(layout, box.depth, whole), { scrollTop } = frame.current!;
    if (y < scrollTop) frame.current!.scrollTop = y;
    else if (y + ROW > scrollTop + height) frame.current!.scrollTop = y + ROW - height;
  }, [current]);
  useEffect(() => setPointer(null), [boxes]);
  useLayoutEffect(() => {
    const ratio = devicePixelRatio || 1, drawing = canvas.current!;
    drawing.width = Math.round(width * ratio);
    drawing.height = Math.round(height * ratio);
    const context = drawing.getContext("2d")!;
    context.scale(ratio, ratio);
    paint(context, boxes, whole, { model, all, layout, colouring, dark, found, selected, current, width, height, top });
  }, [boxes, whole, layout, colouring, dark, found, selected, current, width, height, top, all]);

  const under = (event: MouseEvent): number => {
    const { left, top: y } = canvas.current!.getBoundingClientRect();
    return hit(boxes, layout, whole, width, event.clientX - left, event.clientY - y + frame.current!.scrollTop);
  };
  const box = pointer && boxes.boxes[pointer.index];
  return (
    <div id="graph" ref={frame} onScroll={() => setTop(frame.current!.scrollTop)}>
      <div style={{ height: `${whole}px` }}>
        <canvas id="boxes" ref={canvas} tabIndex={0} role="img" aria-label="flame graph; the table has the same functions"
          aria-describedby="status" style={{ width: `${width}px`, height: `${height}px` }}
          onMouseMove={(event) => {
            const index = under(event);
            if (index >= 0) setCurrent(index);
            setPointer(index > 0 ? { index, x: event.clientX, y: event.clientY } : null);
          }}
          onMouseLeave={() => setPointer(null)}
          onClick={(event) => { const index = under(event); if (index >= 0) zoomTo(index); }} />
      </div>
      {pointer && box && box.func !== ALL && <Tip x={pointer.x} y={pointer.y}>
        <b>{model.name(box.func)}</b>
        {model.file(box.func) && <span class="dim">{model.file(box.func)}</span>}
        <span>{tell(pointer.index)}</span>
      </Tip>}
    </div>
  );
}

/** Beside the pointer, inside of the window. */
function Tip({ x, y, children }: { x: number; y: number; children: preact.ComponentChildren }) {
  const at = useRef<HTMLDivElement>(null);
  const [place, setPlace] = useState<[number, number]>([x, y]);
  useLayoutEffect(() => {
    const { offsetWidth, offsetHeight } = at.current!;
    const left = Math.min(x + 14, innerWidth - offsetWidth - 6);
    const below = y + 18 + offsetHeight < innerHeight;
    setPlace([Math.max(4, left), below ? y + 18 : y - offsetHeight - 10]);
  }, [x, y, children]);
  return <div class="tip" aria-hidden ref={at} style={{ left: `${place[0]}px`, top: `${place[1]}px` }}>{children}</div>;
}
