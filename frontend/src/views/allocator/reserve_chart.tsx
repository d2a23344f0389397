import { useRef, useState } from "preact/hooks";
import type { Over, ReserveCurve } from "../../api/types";
import { across, EVENT_AXIS, TIME_AXIS } from "../../draw/axes";
import { CHART_HEIGHT, paintReserve } from "../../draw/reserve";
import { columnAt, turned } from "../../draw/stack";
import { percent, unitFor, withUnit } from "../../state/bytes";
import { failedInWords } from "../../state/failures";
import { grouped } from "../../state/numbers";
import { duration } from "../../state/time";
import { usePaint, useSurface, useWheel, zoomedByKey } from "../canvas";
import { Tip } from "../tip";

interface Props {
  curve: ReserveCurve | undefined;
  over: Over;
  window: [number, number] | undefined;
  whole: [number, number] | undefined;
  origin: number;
  highest: number;
  /** The shown moment on the axis. */
  at: number | undefined;
  onWidth: (width: number) => void;
  onZoom: (window: [number, number]) => void;
  onScrub: (at: number) => void;
  onStep: (by: 1 | -1) => void;
  onReset: () => void;
}

/** Levels over time or events. Pointing tells, clicking and dragging choose the moment, the wheel zooms. */
export function ReserveChart(props: Props) {
  const { curve, over, window, whole, origin, highest, at } = props;
  const { box: stage, canvas, width } = useSurface(props.onWidth);
  const dragging = useRef(false);
  const [hovered, setHovered] = useState<number | null>(null);
  const x = across(window ?? [0, 1], width);
  const drawn = curve && window && curve.over === over ? curve : undefined;

  const picture = drawn && { curve: drawn, over, x, width, origin, highest };
  usePaint(canvas, picture && ((to) => paintReserve(to, picture)), [drawn, width, highest, window?.[0], window?.[1]]);
  useWheel(canvas, (event) => {
    if (!window || !whole || width === 0) return;
    const least = over === "event" ? 8 : 1000;
    props.onZoom(turned(event, window, x.invert(event.offsetX), whole, least));
  });
  const [left, right] = x.range;
  const inside = (px: number): number => Math.min(Math.max(px, left), right);
  const scrub = useThrottled(props.onScrub);
  const choose = (event: PointerEvent): void => {
    const [from, to] = whole ?? [0, 0];
    scrub(Math.min(Math.max(x.invert(inside(event.offsetX)), from), over === "event" ? to - 1 : to));
  };
  const keys = (event: KeyboardEvent): void => {
    const next = window && whole && zoomedByKey(event, window, whole, at ?? window[0]);
    if (next) props.onZoom(next);
    else if (event.key === "ArrowRight") props.onStep(1);
    else if (event.key === "ArrowLeft") props.onStep(-1);
    else if (event.key === "Escape") props.onReset();
    else return;
    event.preventDefault();
  };
  const place = at === undefined ? undefined : x(over === "event" ? at + 0.5 : at);
  const visible = place !== undefined && place >= left - 1 && place <= right + 1;
  return (
    <div ref={stage} class="stage">
      <canvas
        ref={canvas}
        class="main"
        data-testid="reserve-canvas"
        data-t0={window?.[0]}
        data-t1={window?.[1]}
        tabIndex={0}
        role="application"
        aria-roledescription="chart"
        aria-label={spoken(props)}
        style={{ height: `${CHART_HEIGHT}px` }}
        onKeyDown={keys}
        onPointerDown={(event) => {
          if (event.button !== 0 || !window) return;
          dragging.current = true;
          event.currentTarget.setPointerCapture(event.pointerId);
          choose(event);
        }}
        onPointerMove={(event) => {
          setHovered(inside(event.offsetX));
          if (dragging.current) choose(event);
        }}
        onPointerUp={() => (dragging.current = false)}
        onPointerCancel={() => (dragging.current = false)}
        onPointerLeave={() => setHovered(null)}
        onDblClick={() => whole && props.onZoom(whole)}
      />
      {visible && (
        <span class="cursor-line strong-line" style={{ left: `${place}px`, height: `${CHART_HEIGHT - 28}px` }} />
      )}
      {drawn && hovered !== null && (
        <Tip x={hovered} y={0}>
          <Told curve={drawn} over={over} at={x.invert(hovered)} origin={origin} />
        </Tip>
      )}
    </div>
  );
}

const EVERY = 60;

/** Calls at once, then at most every 60 ms, the last call always: the server draws a moment for each. */
function useThrottled(callback: (at: number) => void): (at: number) => void {
  const latest = useRef(callback);
  const waiting = useRef<{ at: number } | null>(null);
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  latest.current = callback;
  const fire = (): void => {
    timer.current = undefined;
    if (!waiting.current) return;
    const { at } = waiting.current;
    waiting.current = null;
    latest.current(at);
    timer.current = setTimeout(fire, EVERY);
  };
  return (at) => {
    waiting.current = { at };
    if (timer.current === undefined) fire();
  };
}

function Told({ curve, over, at, origin }: { curve: ReserveCurve; over: Over; at: number; origin: number }) {
  const column = columnAt(curve, at);
  const [allocated, pending, reserved] = [curve.allocated[column]!, curve.pending[column]!, curve.reserved?.[column]];
  const unit = unitFor(curve.peak.bytes);
  const when = over === "event" ? `event ${grouped(Math.max(0, Math.floor(at)))}` : duration(at - origin);
  return (
    <>
      {when}
      <br />
      allocated {withUnit(allocated, unit)}
      {pending > 0 && (
        <>
          <br />
          pending {withUnit(pending, unit)}
        </>
      )}
      {reserved !== undefined && (
        <>
          <br />
          reserved {withUnit(reserved, unit)}
          <br />
          unused up to {percent(curve.unused?.[column] ?? 0, 1)}
        </>
      )}
    </>
  );
}

/** The picture in words. */
function spoken({ curve, over, origin }: Props): string {
  if (!curve) return "The curve is loading.";
  const { words } = over === "event" ? EVENT_AXIS : TIME_AXIS;
  const { peak, reserved_peak: reserved, ooms } = curve;
  const when = over === "event" ? `event ${grouped(peak.event)}` : duration(peak.time_ns - origin);
  const failed = failedInWords(ooms.map((one) => ({ bytes: one.requested_bytes, at: `event ${grouped(one.event)}` })));
  const most = reserved ? ` The reserve is at most ${withUnit(reserved.bytes)}.` : "";
  return `Allocated, pending and reserved memory over ${words(curve.t1 - curve.t0)}. Peak ${withUnit(peak.bytes)} at ${when}.${most}${failed} Left and right step through events.`;
}
