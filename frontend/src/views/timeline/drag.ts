/** Pointer on the curve: hovering moves the cursor, a click pins it, dragging marks a range. */
import { useRef, useState } from "preact/hooks";
import type { Scale } from "../../draw/scale";

interface Callbacks {
  onHover: (time: number | undefined) => void;
  onClick: (time: number) => void;
  onRange: (t0: number, t1: number) => void;
}

const LEAST_DRAG = 5;

export function useDrag(x: Scale, width: number, on: Callbacks) {
  const from = useRef<number | null>(null);
  const [box, setBox] = useState<[number, number] | null>(null);
  const inside = (px: number): number => Math.min(Math.max(px, x.range[0]), x.range[1]);
  const range = (px: number): [number, number] => {
    const [a, b] = [from.current ?? px, inside(px)];
    return a < b ? [a, b] : [b, a];
  };
  const handlers = {
    onPointerDown: (event: PointerEvent) => {
      if (event.button !== 0) return;
      from.current = inside(event.offsetX);
      (event.currentTarget as HTMLElement).setPointerCapture(event.pointerId);
    },
    onPointerMove: (event: PointerEvent) => {
      if (width === 0) return;
      on.onHover(x.invert(inside(event.offsetX)));
      if (from.current === null) return;
      const [a, b] = range(event.offsetX);
      setBox(b - a >= LEAST_DRAG ? [a, b] : null);
    },
    onPointerUp: (event: PointerEvent) => {
      if (from.current === null) return;
      const [a, b] = range(event.offsetX);
      from.current = null;
      setBox(null);
      if (b - a >= LEAST_DRAG) on.onRange(x.invert(a), x.invert(b));
      else if (event.detail < 2) on.onClick(x.invert(inside(event.offsetX)));
    },
    onPointerCancel: () => {
      from.current = null;
      setBox(null);
    },
    onPointerLeave: () => on.onHover(undefined),
  };
  return { handlers, box };
}
