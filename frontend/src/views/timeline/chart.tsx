import { useRef, useState } from "preact/hooks";
import type { CurveAnswer, LanesAnswer } from "../../api/types";
import { across, type Axis, TIME_AXIS } from "../../draw/axes";
import { type Lane, laneRows, lanesHeight, spanAt, spanLabel } from "../../draw/lanes";
import type { Scale } from "../../draw/scale";
import { kept, turned, zoomed } from "../../draw/stack";
import { unitFor, withUnit } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { failedInWords } from "../../state/failures";
import { moduleLabel, shortened, visible } from "../../state/names";
import { usePaint, useSurface, useWheel, zoomedByKey } from "../canvas";
import { Tip } from "../tip";
import type { Cursor } from "./cursor";
import { type Failed, paintCurve, paintLanes } from "./paint";
import { Strip } from "./strip";
import { useDrag } from "./drag";
import { type Hit, spanIn, walk, type Walked } from "./lane_walk";
import { usePlotHeight } from "../plot_height";

interface ChartProps {
  by: string;
  curve: CurveAnswer | undefined;
  strip: CurveAnswer | undefined;
  lanes: LanesAnswer | undefined;
  window: [number, number];
  whole: [number, number];
  cursor: Pick<Cursor, "place" | "atPeak" | "hover" | "pin" | "step"> & Partial<Pick<Cursor, "mark" | "flipMark">>;
  peakBytes: number;
  /** Where on the axis; undefined while that is not known. */
  peakPlace: number | undefined;
  /** Requests that failed. */
  failed?: Failed[];
  canZoom: boolean;
  axis?: Axis;
  /** What the strip is colored by; the tab's is always by category. */
  stripBy?: string;
  /** Whether the picture is high enough for the reserve. */
  reserve?: boolean;
  onWidth: (width: number) => void;
  onZoom: (window: [number, number]) => void;
}

/** Pickers, tools, lanes and strip: what stands above and below the plot. */
const OTHERS = 424;

/** The curve, the lanes under it and the strip below, on one axis. */
export function Chart(props: ChartProps) {
  const { curve, lanes, window, whole, cursor, onZoom } = props;
  const { words, place, least } = props.axis ?? TIME_AXIS;
  const { box: stage, canvas: main, width } = useSurface(props.onWidth);
  const lower = useRef<HTMLCanvasElement>(null);
  const [walked, setWalked] = useState<Walked | null>(null);
  const [tip, setTip] = useState<{ x: number; y: number; text: string } | null>(null);
  const height = usePlotHeight(OTHERS, 280, 960);
  const reserve = props.reserve ?? true;
  const rows: Lane[] = lanes ? laneRows(lanes) : [];
  const lowerHeight = lanesHeight(rows);
  const x = across(window, width);

  const { by, axis, strip, failed } = props;
  const picture = curve && { ...props, curve, x, width, height, reserve };
  const changes = [curve, strip, width, height, reserve, by, axis, failed, ...window];
  usePaint(main, picture && ((canvas) => paintCurve(canvas, picture)), changes);
  usePaint(lower, (canvas) => paintLanes(canvas, rows, x, width), [lanes, width, ...window]);

  const drag = useDrag(x, width, {
    onHover: cursor.hover,
    onClick: cursor.pin,
    onRange: (t0, t1) => props.canZoom && onZoom(zoomed([t0, t1], middle([t0, t1]), 1, whole, least)),
  });
  useWheel(main, (event) => {
    if (!props.canZoom || width === 0) return;
    onZoom(turned(event, window, x.invert(event.offsetX), whole, least));
  });
  const keys = (event: KeyboardEvent): void => {
    const next = props.canZoom && zoomedByKey(event, window, whole, cursor.place ?? middle(window), least);
    if (next) onZoom(next);
    else if (event.key === "Home") cursor.pin(undefined);
    else if (event.key === "ArrowRight") cursor.step(1);
    else if (event.key === "ArrowLeft") cursor.step(-1);
    else if (event.key.toLowerCase() === "m" && cursor.flipMark && !event.ctrlKey && !event.metaKey) cursor.flipMark();
    else if (event.key === "Escape") (onZoom(whole), cursor.pin(undefined));
    else return;
    event.preventDefault();
  };
  const spanWords = ({ lane, span }: Hit): string =>
    `${spanLabel(lane.kind, span)} · ${words(span.end_ns - span.start_ns)} from ${place(span.start_ns, whole[0])}`;
  const overLane = (event: PointerEvent): void => {
    const hit = spanAt(rows, event.offsetY, x.invert(event.offsetX));
    setTip(
      hit && {
        x: event.offsetX,
        y: height + event.offsetY,
        text: spanWords(hit),
      },
    );
  };
  const intoLane = (event: MouseEvent): void => {
    const hit = spanAt(rows, event.offsetY, x.invert(event.offsetX));
    if (hit && props.canZoom) onZoom(kept([hit.span.start_ns, hit.span.end_ns], whole));
  };
  const here = walked && spanIn(rows, walked);
  const alongLanes = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && here && props.canZoom) onZoom(kept([here.span.start_ns, here.span.end_ns], whole));
    else if (event.key === "Escape") (onZoom(whole), setWalked(null));
    else {
      const next = walk(rows, walked, event.key, window);
      if (!next) return;
      setWalked(next);
      setTip(null);
    }
    event.preventDefault();
  };
  const at = cursor.place === undefined ? undefined : x(cursor.place);
  const visible = at !== undefined && at >= x.range[0] && at <= x.range[1];
  return (
    <div ref={stage} class="stage">
      <canvas
        ref={main}
        class="main"
        data-testid="timeline-canvas"
        tabIndex={0}
        role="application"
        aria-roledescription="chart"
        aria-label={spoken(props)}
        data-t0={window[0]}
        data-t1={window[1]}
        style={{ height: `${height}px` }}
        onKeyDown={keys}
        onDblClick={() => (onZoom(whole), cursor.pin(undefined))}
        {...drag.handlers}
      />
      <canvas
        ref={lower}
        data-testid="lanes-canvas"
        tabIndex={rows.length > 0 ? 0 : -1}
        role="application"
        aria-roledescription="chart"
        aria-label={`${spokenLanes(rows, words)}. Arrow keys walk from call to call, Enter zooms to one, Escape shows everything.`}
        style={{ height: `${lowerHeight}px` }}
        onPointerMove={overLane}
        onPointerLeave={() => setTip(null)}
        onClick={intoLane}
        onKeyDown={alongLanes}
        onBlur={() => setWalked(null)}
      />
      {cursor.mark?.place !== undefined && width > 0 && (
        <Mark at={x(cursor.mark.place)} cursor={at} range={x.range} height={height + lowerHeight} />
      )}
      {visible && !cursor.atPeak && (
        <span class="cursor-line" style={{ left: `${at}px`, height: `${height + lowerHeight}px` }} />
      )}
      {drag.box && (
        <span
          class="zoom-box"
          style={{ left: `${drag.box[0]}px`, width: `${drag.box[1] - drag.box[0]}px`, height: `${height - 24}px` }}
        />
      )}
      {here && width > 0 && (
        <>
          <span class="walked" style={boxOf(here, x, height)} />
          <Tip x={Math.max(x.range[0], x(here.span.start_ns))} y={height + here.lane.top + here.lane.height} testid="lanes-walked" live>
            {spanWords(here)}
          </Tip>
        </>
      )}
      {tip && (
        <Tip x={tip.x} y={tip.y} testid="lanes-tip">
          {tip.text}
        </Tip>
      )}
      <Strip
        curve={props.strip}
        by={props.stripBy ?? (props.by === "category" ? "category" : undefined)}
        window={window}
        whole={whole}
        width={width}
        onZoom={onZoom}
        enabled={props.canZoom}
        least={least}
        reserve={reserve}
      />
    </div>
  );
}

/** Around a span, as far as it is in sight. */
function boxOf({ lane, span }: Hit, x: Scale, top: number): Record<string, string> {
  const [from, to] = [Math.max(x.range[0], x(span.start_ns)), Math.min(x.range[1], x(span.end_ns))];
  return { left: `${from}px`, width: `${Math.max(3, to - from)}px`, top: `${top + lane.top}px`, height: `${lane.height}px` };
}

interface MarkProps {
  at: number;
  cursor: number | undefined;
  range: Scale["range"];
  height: number;
}

/** The marked moment, and the stretch from there to the cursor, as far as they are in sight. */
function Mark({ at, cursor, range, height }: MarkProps) {
  const inside = (px: number): number => Math.min(Math.max(px, range[0]), range[1]);
  const [from, to] = [inside(at), inside(cursor ?? at)];
  return (
    <>
      <span
        class="mark-range"
        style={{ left: `${Math.min(from, to)}px`, width: `${Math.abs(to - from)}px`, height: `${height}px` }}
      />
      {at === from && (
        <span
          class={at > range[1] - 60 ? "mark-line left" : "mark-line"}
          data-testid="mark-line"
          style={{ left: `${at}px`, height: `${height}px` }}
        >
          <span>mark</span>
        </span>
      )}
    </>
  );
}

function middle([from, to]: [number, number]): number {
  return (from + to) / 2;
}

/** The picture in words. */
function spoken({ curve, by, window, whole, peakBytes, peakPlace, axis, cursor, failed = [] }: ChartProps): string {
  if (!curve) return "The curve is loading.";
  const { words, place } = axis ?? TIME_AXIS;
  const unit = unitFor(peakBytes);
  const { column } = curve.peak;
  const when = peakPlace === undefined ? "" : ` at ${place(peakPlace, whole[0])}`;
  const parts = curve.keys.map(
    (key, k) =>
      `${shortened(visible(by === "module" ? moduleLabel(key) : categoryLabel(curve.labels?.[k] ?? key)), 60)} ${withUnit(curve.stacks[k]?.[column] ?? 0, unit)}`,
  );
  const lost = failedInWords(failed.map((one) => ({ bytes: one.bytes, at: place(one.place, whole[0]) })));
  const keys = "Left and right step through events, plus and minus zoom, with Shift left and right move, Home goes to the peak, Escape shows everything.";
  const marks = cursor.flipMark ? " M marks the moment to compare others with." : "";
  return `Allocated memory by ${by} over ${words(window[1] - window[0])}. Peak ${withUnit(peakBytes, unit)}${when}. At the highest moment shown: ${parts.join(", ")}.${lost} ${keys}${marks}`;
}

function spokenLanes(rows: Lane[], words: Axis["words"]): string {
  const counts = rows.map((row) => `${row.spans.length} ${row.label || "inner modules"}`);
  const phases = rows.find((row) => row.kind === "phase")?.spans.map((s) => `${s.name} ${words(s.end_ns - s.start_ns)}`) ?? [];
  return `Lanes: ${counts.join(", ")}. ${phases.slice(0, 8).join(", ")}`;
}
