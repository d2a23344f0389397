import { useMemo, useRef, useState } from "preact/hooks";
import type { AllocationAnswer, BandsAnswer } from "../../api/types";
import { across, EVENT_AXIS, TIME_AXIS } from "../../draw/axes";
import { NOTHING, ownerAt, ownersOf } from "../../draw/bands";
import { kept, turned } from "../../draw/stack";
import { sharpness } from "../../draw/surface";
import { exactBytes, withUnit } from "../../state/bytes";
import { cellText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { asPartOfPeak } from "../../state/app";
import { partLabel } from "../divisions";
import { usePaint, useSurface, useWheel, zoomedByKey } from "../canvas";
import { useDrag } from "../timeline/drag";
import { usePlotHeight } from "../plot_height";
import { Tip } from "../tip";
import { bottomOf, paintBands, paintMarks, ROOM, TOP } from "./paint";

/** Pickers, sentence and tools above the plot, its key below. */
const OTHERS = 330;

interface Props {
  answer: BandsAnswer | undefined;
  color: string;
  window: [number, number] | undefined;
  whole: [number, number] | undefined;
  origin: number;
  /** Row of the allocation that was kept, and what is known of its life. */
  selected: number | null;
  life: AllocationAnswer | undefined;
  onWidth: (width: number) => void;
  onHover: (row: number | null) => void;
  onPick: (row: number | null) => void;
  onZoom: (window: [number, number]) => void;
}

/** Bands over time or events. Pointing tells which allocation it is, a click keeps it, dragging zooms. */
export function BandsChart(props: Props) {
  const { answer, window, whole, origin, selected, onZoom } = props;
  const { box: stage, canvas, width } = useSurface(props.onWidth);
  const marks = useRef<HTMLCanvasElement>(null);
  const [hovered, setHovered] = useState(NOTHING);
  const [at, setAt] = useState({ x: 0, y: 0 });
  const height = usePlotHeight(OTHERS, 300, 620);
  const bottom = bottomOf(height);
  const over = answer?.over ?? "time";
  const axis = over === "event" ? EVENT_AXIS : TIME_AXIS;
  const shown: [number, number] = answer ? [answer.t0, answer.t1] : (window ?? [0, 1]);
  // The old bands stand where they belong in the new window, until its own are there.
  const drawn = window ?? shown;
  const x = across(drawn, width);
  const top = useMemo(() => (answer ? Math.max(1, ...answer.max) * ROOM : 1), [answer]);
  const owners = useMemo(
    () => (answer ? ownersOf(answer, Math.round((bottom - TOP) * sharpness()), top) : undefined),
    [answer, top, bottom],
  );
  const picture = answer && owners && width > 0 ? { answer, owners, top, x, width, height, axis, origin, color: props.color } : undefined;
  const band = answer && selected !== null ? answer.bands.row.indexOf(selected) : NOTHING;

  usePaint(canvas, picture && ((to) => paintBands(to, picture)), [answer, owners, width, ...drawn]);
  const marked = { hovered, selected: band, life: props.life };
  usePaint(marks, picture && ((to) => paintMarks(to, picture, marked)), [answer, owners, width, ...drawn, ...Object.values(marked)]);

  /** How far through the answer's columns a place is. */
  const shareAt = (px: number): number => (x.invert(px) - shown[0]) / Math.max(1, shown[1] - shown[0]);
  const point = (px: number, py: number): void => {
    if (!answer || !owners) return;
    const inside = px >= x.range[0] && px < x.range[1];
    const found = inside ? ownerAt(owners, shareAt(px), (py - TOP) / (bottom - TOP)) : NOTHING;
    setAt({ x: px, y: py });
    if (found === hovered) return;
    setHovered(found);
    props.onHover(answer.bands.row[found] ?? null);
  };
  const leave = (): void => (setHovered(NOTHING), props.onHover(null));
  const drag = useDrag(x, width, {
    onHover: () => undefined,
    onClick: () => props.onPick(answer?.bands.row[hovered] ?? null),
    onRange: (t0, t1) => whole && onZoom(kept([t0, t1], whole)),
  });
  const least = over === "event" ? 8 : 1000;
  useWheel(canvas, (event) => {
    if (!window || !whole || width === 0) return;
    onZoom(turned(event, window, x.invert(event.offsetX), whole, least));
  });
  const keys = (event: KeyboardEvent): void => {
    if (!answer || !window || !whole) return;
    const nearer = zoomedByKey(event, window, whole, (window[0] + window[1]) / 2, least);
    if (nearer) onZoom(nearer);
    else if (event.key === "Escape") (onZoom(whole), props.onPick(null));
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const next = band < 0 ? largestOf(answer) : band + (event.key === "ArrowRight" ? 1 : -1);
      const row = answer.bands.row[next];
      if (row !== undefined) props.onPick(row);
    } else return;
    event.preventDefault();
  };
  const column = answer ? Math.min(answer.px - 1, Math.max(0, Math.floor(shareAt(at.x) * answer.px))) : 0;
  return (
    <div ref={stage} class="stage bands">
      <canvas
        ref={canvas}
        class="main"
        data-testid="bands-canvas"
        data-t0={shown[0]}
        data-t1={shown[1]}
        data-bands={answer?.bands.row.length ?? 0}
        tabIndex={0}
        role="application"
        aria-roledescription="chart"
        aria-label={spoken(answer)}
        style={{ height: `${height}px` }}
        onKeyDown={keys}
        onDblClick={() => whole && onZoom(whole)}
        onPointerDown={drag.handlers.onPointerDown}
        onPointerMove={(event) => {
          drag.handlers.onPointerMove(event);
          if (drag.box) return;
          point(event.offsetX, event.offsetY);
        }}
        onPointerUp={drag.handlers.onPointerUp}
        onPointerCancel={drag.handlers.onPointerCancel}
        onPointerLeave={leave}
      />
      <canvas ref={marks} class="marks" aria-hidden="true" data-testid="bands-marks" data-band={band} data-hovered={hovered} />
      {drag.box && (
        <span class="zoom-box" style={{ left: `${drag.box[0]}px`, width: `${drag.box[1] - drag.box[0]}px`, height: `${bottom}px` }} />
      )}
      {answer && hovered !== NOTHING && !drag.box && (
        <Tip {...at} testid="bands-tip">
          {tip(answer, hovered, column, props.color)}
        </Tip>
      )}
    </div>
  );
}

/** What is pointed at: one allocation, or in this column the small ones of a key. It may be of the answer before. */
function tip({ bands, keys, parts }: BandsAnswer, hovered: number, column: number, color: string): string {
  const pile = hovered - bands.row.length;
  const size = (pile < 0 ? bands.bytes[hovered] : parts?.[pile]?.[column]) ?? 0;
  const words = `${asPartOfPeak(size)} (${exactBytes(size)})`;
  const tensor = bands.tensor[hovered] ?? null;
  return pile < 0 ? (tensor === null ? words : `${words} ${cellText(tensor)}`) : `${partLabel(color, keys[pile]?.label ?? "")}: ${words} in small allocations`;
}

function largestOf({ bands }: BandsAnswer): number {
  return bands.bytes.reduce((best, bytes, band) => (bytes > (bands.bytes[best] ?? -1) ? band : best), 0);
}

function spoken(answer: BandsAnswer | undefined): string {
  if (!answer) return "The allocations are loading.";
  return `${grouped(answer.bands.row.length)} allocations as bands over ${answer.over}, and ${grouped(answer.others)} smaller ones in piles. Highest ${withUnit(answer.peak.bytes)}. Left and right keep one allocation after the other, plus and minus zoom, with Shift left and right move, Escape shows everything.`;
}
