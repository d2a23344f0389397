import { useRef } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { CurveAnswer, MomentAnswer } from "../../api/types";
import { drawLayers, drawOutline } from "../../draw/area";
import { readPalette } from "../../draw/palette";
import { linear } from "../../draw/scale";
import { ceiling } from "../../draw/stack";
import { prepare, sharpness } from "../../draw/surface";
import { navigate, stretch } from "../../state/app";
import { withUnit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import type { Pick } from "../../state/selection";
import { duration } from "../../state/time";
import { usePaint, useSurface } from "../canvas";

const HEIGHT = 54;

/** The step's curve in a strip: a click or a drag on it chooses the moment, the arrow keys step through events. */
export function MomentStrip({ pick, event, time }: { pick: Pick; event: number | null; time: number | null }) {
  const { box: stage, canvas, width } = useSurface();
  const dragging = useRef(false);
  const { from, to, peak } = stretch.value!;
  const px = Math.min(4000, Math.max(1, Math.round(width * sharpness())));
  const curve = useRemote<CurveAnswer>(width > 0 ? address("curve", { ...pick, by: "category", px }) : null);
  const near = useRemote<MomentAnswer>(event === null ? null : address("moment", { ...pick, event, by: "category" }), 120, ["event"]);
  const x = linear([from, to], [0, Math.max(1, width)]);
  const { data } = curve;
  usePaint(canvas, data && ((to) => paint(to, data, x, width, peak.time)), [data, width]);
  const choose = (pointer: PointerEvent): void => {
    const at = Math.min(Math.max(pointer.offsetX, 0), width);
    navigate({ of: undefined, t: String(Math.round(x.invert(at))), event: undefined });
  };
  const keys = (key: KeyboardEvent): void => {
    if (key.key === "Escape") navigate({ t: undefined, event: undefined });
    else if (key.key === "ArrowLeft" || key.key === "ArrowRight") {
      const now = near.data;
      if (!now || near.stale) return key.preventDefault();
      const [next, when] =
        key.key === "ArrowLeft"
          ? [now.previous_event, now.previous_event_ns]
          : [now.next_event, now.next_event_ns];
      if (next !== null && when !== null) navigate({ of: undefined, t: String(when), event: String(next) });
    } else return;
    key.preventDefault();
  };
  const words =
    time === null
      ? "The step's memory."
      : `${duration(time - from)}${event === null || event < 0 ? "" : `, event ${grouped(event)}`}`;
  return (
    <section class="card strip-card" aria-busy={near.loading || curve.loading}>
      <div ref={stage} class="stage moment-strip">
        <canvas
          ref={canvas}
          data-testid="moment-strip"
          data-event={event ?? ""}
          tabIndex={0}
          role="slider"
          aria-label="The moment whose stacks are shown. Arrow keys step through events, Escape goes to the peak."
          aria-valuetext={words}
          aria-valuenow={time ?? peak.time}
          aria-valuemin={from}
          aria-valuemax={to}
          style={{ height: `${HEIGHT}px` }}
          onKeyDown={keys}
          onPointerDown={(e) => {
            if (e.button !== 0) return;
            dragging.current = true;
            canvas.current?.setPointerCapture(e.pointerId);
            choose(e);
          }}
          onPointerMove={(e) => dragging.current && choose(e)}
          onPointerUp={() => (dragging.current = false)}
          onPointerCancel={() => (dragging.current = false)}
          onDblClick={() => navigate({ t: undefined, event: undefined })}
        />
        {time !== null && width > 0 && (
          <span class="cursor-line strong-line" style={{ left: `${Math.min(width - 1, Math.max(0, x(time)))}px`, height: `${HEIGHT}px` }} />
        )}
      </div>
      <p class="hint">
        <span title={time === null ? undefined : `${grouped(time - from)} ns`}>{words}</span>
        {" · "}peak {withUnit(peak.bytes)} · click or drag to choose a moment · ← → step through events
      </p>
    </section>
  );
}

function paint(canvas: HTMLCanvasElement, curve: CurveAnswer, x: ReturnType<typeof linear>, width: number, peak: number): void {
  const context = prepare(canvas, { width, height: HEIGHT });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const frame = { x, y: linear([0, ceiling([{ ...curve, reserved: null }])], [HEIGHT - 1, 2]) };
  drawLayers(context, curve, "category", frame, palette);
  drawOutline(context, curve, frame, palette, false);
  context.fillStyle = palette.peak;
  context.beginPath();
  context.arc(Math.min(width - 4, Math.max(4, x(peak))), frame.y(Math.max(...curve.max)), 3.5, 0, 2 * Math.PI);
  context.fill();
}
