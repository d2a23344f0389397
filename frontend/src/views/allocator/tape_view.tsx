import { useMemo, useState } from "preact/hooks";
import { FREE, type Home, type SegmentsAnswer } from "../../api/types";
import { drawFrame, drawTape, LINE } from "../../draw/paint_tape";
import { readPalette } from "../../draw/palette";
import { prepare } from "../../draw/surface";
import { lastLine, pieceAt, pieceStarts, segmentAt, type Tape } from "../../draw/tape";
import { exactBytes } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import { asPartOfPeak } from "../../state/app";
import { usePaint, useSurface } from "../canvas";
import { Tip } from "../tip";

/** A piece under the pointer or under the keyboard's cursor: an index into the answer's pieces. */
export interface Place {
  piece: number;
  x: number;
  y: number;
}

interface Props {
  answer: SegmentsAnswer | undefined;
  tape: Tape | undefined;
  by: string;
  height: number;
  /** The kept allocation. */
  selected: number | null;
  heading: (home: Home) => string;
  onWidth: (width: number) => void;
  onScroll: (top: number) => void;
  onHover: (place: Place | null) => void;
  onPick: (row: number | null) => void;
}

/** The tape in a box that scrolls; only the lines in sight are drawn. */
export function TapeView(props: Props) {
  const { answer, tape, by, height, selected } = props;
  const { box, canvas } = useSurface(props.onWidth);
  const [top, setTop] = useState(0);
  const [hovered, setHovered] = useState<Place | null>(null);
  const starts = useMemo(
    () => (answer ? pieceStarts(answer.pieces, answer.segments.bytes.length) : undefined),
    [answer],
  );
  const kept = useMemo(
    () => (answer && selected !== null ? answer.pieces.row.indexOf(selected) : -1),
    [answer, selected],
  );
  const whole = (tape?.lines ?? 0) * LINE + 6;

  const paint = (to: HTMLCanvasElement): void => {
    if (!answer || !tape || !starts) return;
    const context = prepare(to, { width: tape.width, height });
    if (!context) return;
    const palette = readPalette(to, context);
    const style = getComputedStyle(to);
    const [free, unknown] = ["--free", "--cat-unknown"].map((name) => style.getPropertyValue(name).trim()) as [
      string,
      string,
    ];
    const picture = { tape, answer, starts, top, height, by, free, unknown, heading: props.heading };
    drawTape(context, picture, palette);
    for (const [piece, line] of [
      [hovered?.piece ?? -1, palette.accent],
      [kept, palette.text],
    ] as const)
      if (piece >= 0 && piece < answer.pieces.bytes.length)
        drawFrame(context, picture, placeOf(answer, piece), { line, halo: palette.ground });
  };
  usePaint(canvas, paint, [answer, tape, starts, top, height, hovered?.piece, kept, by]);

  const show = (place: Place | null): void => (setHovered(place), props.onHover(place));
  const point = (event: PointerEvent | MouseEvent): Place | null => {
    if (!answer || !tape || !starts) return null;
    const hit = segmentAt(tape, Math.floor((event.offsetY + top) / LINE), event.offsetX);
    const piece = hit ? pieceAt(answer.pieces, starts, hit.segment, hit.offset) : -1;
    return piece < 0 ? null : { piece, x: event.offsetX, y: event.offsetY };
  };
  const walk = (by: 1 | -1): void => {
    if (!answer || !tape) return;
    const from = hovered?.piece ?? kept;
    const piece = Math.min(Math.max(from + by, 0), answer.pieces.bytes.length - 1);
    if (piece < 0) return;
    const line = tape.line[answer.pieces.segment[piece]!]!;
    const until = lastLine(tape, answer.pieces.segment[piece]!);
    if (until * LINE < top || line * LINE > top + height) box.current!.scrollTop = line * LINE;
    show({ piece, x: 0, y: Math.max(0, line * LINE - top) });
  };
  const keys = (event: KeyboardEvent): void => {
    if (event.key === "ArrowRight") walk(1);
    else if (event.key === "ArrowLeft") walk(-1);
    else if (event.key === "Enter" && hovered && answer) props.onPick(rowOf(answer, hovered.piece));
    else if (event.key === "Escape") (show(null), props.onPick(null));
    else return;
    event.preventDefault();
  };
  return (
    <div class="tape-box">
      <div
        ref={box}
        class="tape"
        style={{ height: `${height}px` }}
        onScroll={(event) => (setTop(event.currentTarget.scrollTop), props.onScroll(event.currentTarget.scrollTop))}
      >
        <div style={{ height: `${Math.max(whole, height)}px` }}>
          <canvas
            ref={canvas}
            data-testid="tape-canvas"
            data-lines={tape?.lines}
            tabIndex={0}
            role="application"
            aria-roledescription="chart"
            aria-label={spoken(answer)}
            onPointerMove={(event) => show(point(event))}
            onPointerLeave={() => show(null)}
            onClick={(event) => {
              const place = point(event);
              if (place && answer) props.onPick(rowOf(answer, place.piece));
            }}
            onKeyDown={keys}
          />
        </div>
      </div>
      {hovered && answer && (
        <Tip x={hovered.x} y={hovered.y}>
          <Told answer={answer} piece={hovered.piece} />
        </Tip>
      )}
    </div>
  );
}

function placeOf(answer: SegmentsAnswer, piece: number): { segment: number; offset: number; bytes: number } {
  const { segment, offset, bytes } = answer.pieces;
  return { segment: segment[piece]!, offset: offset[piece]!, bytes: bytes[piece]! };
}

function rowOf(answer: SegmentsAnswer, piece: number): number | null {
  const row = answer.pieces.row[piece] ?? -1;
  return row < 0 ? null : row;
}

function Told({ answer, piece }: { answer: SegmentsAnswer; piece: number }) {
  const { pieces, segments } = answer;
  const bytes = pieces.bytes[piece]!;
  const count = pieces.count[piece]!;
  const free = pieces.state[piece] === FREE;
  const text =
    count > 1
      ? `${grouped(count)} blocks and gaps, ${asPartOfPeak(bytes)}: larger shows each`
      : free
        ? `free: ${asPartOfPeak(bytes)}`
        : `a block that takes ${asPartOfPeak(bytes)}`;
  const segment = segments.bytes[pieces.segment[piece]!]!;
  return (
    <>
      {text}
      <br />
      of a segment of {asPartOfPeak(segment)}
    </>
  );
}

function spoken(answer: SegmentsAnswer | undefined): string {
  if (!answer) return "The segments are loading.";
  const whole = answer.segments.bytes.reduce((sum, bytes) => sum + bytes, 0);
  const free = answer.segments.free.reduce((sum, bytes) => sum + bytes, 0);
  return `${grouped(answer.segments.bytes.length)} segments of ${exactBytes(whole)}, ${exactBytes(free)} of them free. Left and right go from block to block, Enter keeps one.`;
}
