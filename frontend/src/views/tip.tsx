import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

const BESIDE = 14;
const BELOW = 18;

interface Props {
  /** What it tells about: pixels from the left and the top of the box that it stands in. */
  x: number;
  y: number;
  testid?: string;
  id?: string | number;
  class?: string;
  live?: boolean;
  children: ComponentChildren;
}

/** Words beside a place in a drawing: right of it and below, or as far left and above as box and window require. */
export function Tip({ x, y, testid, id, class: look, live, children }: Props) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => stand(box.current!, x, y));
  return (
    <div ref={box} class={look ? `tip ${look}` : "tip"} role={live ? "status" : undefined} data-testid={testid} data-id={id}>
      {children}
    </div>
  );
}

function stand(tip: HTMLElement, x: number, y: number): void {
  tip.style.left = tip.style.top = "0"; // where nothing narrows it
  const { width, height } = tip.getBoundingClientRect();
  const around = (tip.offsetParent ?? document.body).getBoundingClientRect();
  const above = y - height - BELOW;
  const overlaps = around.top + y + BELOW + height > window.innerHeight && around.top + above >= 0;
  tip.style.left = `${Math.max(0, Math.min(x + BESIDE, around.width - width))}px`;
  tip.style.top = `${overlaps ? above : y + BELOW}px`;
}
