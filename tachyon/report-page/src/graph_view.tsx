// The flame graph on a canvas that is as large as what can be seen of it.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { type Boxes, type Colouring, hit, type Layout, paint, row, ROW } from "./graph";
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
  setCurrent(index: number): void;
  setWidth(pixels: number): void;
  zoomTo(index: number): void;
}

export function Graph(props: Props) {
  const { model, all, boxes, layout, colouring, found, selected, current, setCurrent, setWidth, zoomTo } = props;
  const frame = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [size, setSize] = useState<[number, number]>([800, 400]);
  const [top, setTop] = useState(0);
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
  useLayoutEffect(() => {
    const ratio = devicePixelRatio || 1, drawing = canvas.current!;
    drawing.width = Math.round(width * ratio);
    drawing.height = Math.round(height * ratio);
    const context = drawing.getContext("2d")!;
    context.scale(ratio, ratio);
    paint(context, boxes, whole, { model, all, layout, colouring, found, selected, current, width, height, top });
  });

  const under = (event: MouseEvent): number => {
    const { left, top: y } = canvas.current!.getBoundingClientRect();
    return hit(boxes, layout, whole, width, event.clientX - left, event.clientY - y + frame.current!.scrollTop);
  };
  return (
    <div id="graph" ref={frame} onScroll={() => setTop(frame.current!.scrollTop)}>
      <div style={{ height: `${whole}px` }}>
        <canvas id="boxes" ref={canvas} tabIndex={0} role="img" aria-label="flame graph; the table has the same functions"
          aria-describedby="status" style={{ width: `${width}px`, height: `${height}px` }}
          onMouseMove={(event) => { const index = under(event); if (index >= 0) setCurrent(index); }}
          onClick={(event) => { const index = under(event); if (index >= 0) zoomTo(index); }} />
      </div>
    </div>
  );
}
