import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type StacksAnswer, WITHOUT } from "../../api/stacks";
import { layFlame, neighbour, nodeAt } from "../../draw/flame";
import { drawFlame, type FlamePicture, LEVEL } from "../../draw/paint_flame";
import { readPalette } from "../../draw/palette";
import { prepare, watchWidth } from "../../draw/surface";
import { dark } from "../../host/theme";
import { navigate } from "../../state/app";
import { exactBytes, percent, withUnit } from "../../state/bytes";
import { frameName } from "../../state/frames";
import { grouped } from "../../state/numbers";
import { FlameTip } from "./flame_tip";
import type { Frames } from "./stacks";

const TALLEST = 30;

interface Props {
  answer: StacksAnswer;
  searching: boolean;
  frames: Frames;
}

/** Calls from the outermost frame at the top; as wide as the bytes that they allocated. */
export function FlameView({ answer, searching, frames }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const [top, setTop] = useState(0);
  const [hover, setHover] = useState<{ place: number; x: number; y: number } | null>(null);
  const [focused, setFocused] = useState(-1);
  const theme = dark.value;
  const flame = useMemo(() => layFlame(answer.nodes, answer.node), [answer]);
  const levels = flame.levels.length;
  const height = Math.min(levels, TALLEST) * LEVEL;
  const zoomedIn = answer.node !== 0;
  const shownNode = focused >= 0 && focused < answer.nodes.id.length ? focused : -1;

  useEffect(() => watchWidth(box.current!, setWidth), []);
  useEffect(() => {
    setFocused(-1);
    setHover(null);
  }, [answer.event, answer.of, answer.node, frames]);
  useEffect(() => {
    const picture = { answer, flame, width, top, height, searching, hovered: hover?.place ?? -1, focused: shownNode };
    if (canvas.current) paint(canvas.current, picture);
  }, [answer, flame, width, top, height, theme, searching, hover?.place, shownNode]);

  const zoomTo = (place: number): void => {
    const id = answer.nodes.id[place];
    if (id !== undefined) navigate({ node: id === 0 ? undefined : String(id) });
  };
  const under = (event: PointerEvent | MouseEvent): number =>
    nodeAt(flame, Math.floor((event.offsetY + top) / LEVEL), event.offsetX / Math.max(1, width));
  const keys = (event: KeyboardEvent): void => {
    if (event.key.startsWith("Arrow")) {
      const at = neighbour(flame, answer.nodes, shownNode, event.key);
      setFocused(at);
      setHover(null);
      scrollTo(box.current, flame.depth[at]! * LEVEL);
    } else if (event.key === "Enter" && shownNode >= 0) zoomTo(shownNode);
    else if (event.key === "Escape" && (zoomedIn || shownNode >= 0)) (navigate({ node: undefined }), setFocused(-1));
    else return;
    event.preventDefault();
  };
  const place = hover?.place ?? shownNode;
  const at = hover ?? (shownNode >= 0 ? beside(flame, shownNode, width, top) : null);
  return (
    <section class="card flame-card">
      <div class="row">
        <h2 class="grow">
          {answer.of === "step" ? "Allocated bytes" : "Live bytes"} by call stack, outermost frame at the top
        </h2>
        <FlameKey without={answer.nodes.label.includes(WITHOUT)} />
        {zoomedIn && (
          <button type="button" class="small" data-testid="flame-reset" onClick={() => navigate({ node: undefined })}>
            all stacks
          </button>
        )}
      </div>
      <div
        ref={box}
        class="flame"
        style={{ height: `${height + 2}px` }}
        onScroll={(e) => setTop(Math.round(e.currentTarget.scrollTop))}
      >
        <div style={{ height: `${levels * LEVEL}px` }}>
          <canvas
            ref={canvas}
            data-testid="flame-canvas"
            data-node={answer.node}
            data-levels={levels}
            data-nodes={answer.nodes.id.length}
            tabIndex={0}
            role="application"
            aria-roledescription="chart"
            aria-label={spoken(answer)}
            style={{ height: `${height}px` }}
            onKeyDown={keys}
            onPointerMove={(e) => {
              const found = under(e);
              setHover(found < 0 ? null : { place: found, x: e.offsetX, y: e.offsetY });
            }}
            onPointerLeave={() => setHover(null)}
            onClick={(e) => {
              const found = under(e);
              if (found >= 0) zoomTo(found);
            }}
          />
        </div>
      </div>
      {place >= 0 && at && place < answer.nodes.id.length && (
        <FlameTip answer={answer} place={place} x={at.x} y={at.y + 34} width={width} />
      )}
      <p class="foot">
        click or Enter zooms in, Esc zooms out, arrow keys walk from frame to frame
        {frames === "folded" && " · +3 stands for three more frames that all went through"}
        {answer.omitted > 0 && ` · ${grouped(answer.omitted)} narrower than half a pixel: zoom in to see them`}
      </p>
    </section>
  );
}

function FlameKey({ without }: { without: boolean }) {
  return (
    <span class="keys" aria-hidden="true">
      <span class="key">
        <span class="swatch flame-user" />
        your code
      </span>
      <span class="key">
        <span class="swatch flame-library" />
        libraries
      </span>
      <span class="key">
        <span class="swatch flame-native" />
        C++
      </span>
      {without && (
        <span class="key">
          <span class="swatch flame-none" />
          no stack
        </span>
      )}
    </span>
  );
}

function beside(flame: ReturnType<typeof layFlame>, place: number, width: number, top: number) {
  return { x: flame.left[place]! * width, y: (flame.depth[place]! + 1) * LEVEL - top };
}

/** Keeps a level in sight. */
function scrollTo(box: HTMLDivElement | null, y: number): void {
  if (!box) return;
  if (y < box.scrollTop) box.scrollTop = y;
  else if (y + LEVEL > box.scrollTop + box.clientHeight) box.scrollTop = y + LEVEL - box.clientHeight;
}

function paint(canvas: HTMLCanvasElement, picture: FlamePicture): void {
  const context = prepare(canvas, { width: picture.width, height: picture.height });
  if (!context) return;
  const style = getComputedStyle(canvas);
  const known = new Map<string, string>();
  const read = (name: string): string => {
    let colour = known.get(name);
    if (colour === undefined) known.set(name, (colour = style.getPropertyValue(name).trim() || "#888"));
    return colour;
  };
  drawFlame(context, picture, { read, hatch: readPalette(canvas, context).fill("category", "unknown", 0) });
}

/** The picture in words: the widest frames. */
function spoken(answer: StacksAnswer): string {
  const { nodes, frames } = answer;
  const widest = nodes.label
    .map((label, place) => ({ label, place }))
    .filter(({ label, place }) => label >= 0 && nodes.bytes[place]! < answer.bytes)
    .slice(0, 400)
    .sort((a, b) => nodes.bytes[b.place]! - nodes.bytes[a.place]!)
    .slice(0, 6)
    .map(({ label, place }) => `${frameName(frames[label]!)} ${percent(nodes.bytes[place]!, answer.bytes)}`);
  return `Flame graph of ${withUnit(answer.bytes)} (${exactBytes(answer.bytes)}) by call stack. ${widest.join(", ")}. Arrow keys walk, Enter zooms.`;
}

