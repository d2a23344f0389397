import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { type Flame, layFlame, neighbor, nodeAt, type Tree } from "../draw/flame";
import { type Bar, drawFlame, type Paints } from "../draw/paint_flame";
import { readPalette } from "../draw/palette";
import { prepare } from "../draw/surface";
import { usePaint, useSurface } from "./canvas";
import { Tip } from "./tip";

const TALLEST = 640;

interface Props {
  /** `flame`, `icicle`: what test ids begin with. */
  testid: string;
  tree: Tree;
  /** Pixels from one level to the next. */
  level: number;
  /** The id of the node that fills the width. */
  zoom: number;
  /** How a place looks; the same function as long as it looks the same. */
  look: (paints: Paints) => (place: number) => Bar;
  /** The picture in words. */
  label: string;
  /** What the pointer or the keyboard is on, in words. */
  tip: (place: number) => ComponentChildren;
  tipKey: (place: number) => string | number;
  /** When any of these changes, hover and focus are dropped: no bar is where it was. */
  fresh: readonly unknown[];
  onZoom: (place: number) => void;
}

/** A tree that hangs from its root, as wide as its bytes: hover tells, click and Enter zoom in, Esc zooms out. */
export function FlameChart({ testid, tree, level, zoom, look, label, tip, tipKey, fresh, onZoom }: Props) {
  const { box, canvas, width } = useSurface();
  const [top, setTop] = useState(0);
  const [hover, setHover] = useState<{ place: number; x: number; y: number } | null>(null);
  const [focused, setFocused] = useState(-1);
  const flame = useMemo(() => layFlame(tree, zoom), [tree, zoom]);
  const count = tree.id.length;
  const levels = flame.levels.length;
  const most = Math.floor(TALLEST / level);
  const height = levels > most ? most * level - (level >> 1) : levels * level; // half a level says that there is more
  const shownNode = focused >= 0 && focused < count ? focused : -1;

  useEffect(() => {
    setFocused(-1);
    setHover(null);
  }, fresh);
  const paint = (to: HTMLCanvasElement): void => {
    const context = prepare(to, { width, height });
    if (!context) return;
    const paints = paintsOf(to, context);
    drawFlame(context, { flame, level, width, top, height, hovered: hover?.place ?? -1, focused: shownNode }, look(paints), paints);
  };
  usePaint(canvas, paint, [flame, level, look, width, top, height, hover?.place, shownNode]);

  const under = (event: PointerEvent | MouseEvent): number =>
    nodeAt(flame, Math.floor((event.offsetY + top) / level), event.offsetX / Math.max(1, width));
  const keys = (event: KeyboardEvent): void => {
    if (event.key.startsWith("Arrow")) {
      const at = neighbor(flame, tree, shownNode, event.key);
      setFocused(at);
      setHover(null);
      scrollTo(box.current, flame.depth[at]! * level, level);
    } else if (event.key === "Enter" && shownNode >= 0) onZoom(shownNode);
    else if (event.key === "Escape" && (zoom !== tree.id[0] || shownNode >= 0)) (onZoom(0), setFocused(-1));
    else return;
    event.preventDefault();
  };
  const place = hover?.place ?? shownNode;
  const at = hover ?? (shownNode >= 0 ? beside(flame, shownNode, width, level, top) : null);
  return (
    <div class="flame-chart">
      <div
        ref={box}
        class="flame"
        style={{ height: `${height + 2}px` }}
        onScroll={(e) => setTop(Math.round(e.currentTarget.scrollTop))}
      >
        <div style={{ height: `${levels * level}px` }}>
          <canvas
            ref={canvas}
            data-testid={`${testid}-canvas`}
            data-node={zoom}
            data-levels={levels}
            data-nodes={count}
            tabIndex={0}
            role="application"
            aria-roledescription="chart"
            aria-label={label}
            style={{ height: `${height}px` }}
            onKeyDown={keys}
            onPointerMove={(e) => {
              const found = under(e);
              setHover(found < 0 ? null : { place: found, x: e.offsetX, y: e.offsetY });
            }}
            onPointerLeave={() => setHover(null)}
            onClick={(e) => {
              const found = under(e);
              if (found >= 0) onZoom(found);
            }}
          />
        </div>
      </div>
      {place >= 0 && at && place < count && (
        <Tip x={at.x} y={at.y} testid={`${testid}-tip`} id={tipKey(place)} class="flame-tip" live>
          {tip(place)}
        </Tip>
      )}
    </div>
  );
}

function beside(flame: Flame, place: number, width: number, level: number, top: number) {
  return { x: flame.left[place]! * width, y: (flame.depth[place]! + 1) * level - top };
}

/** Keeps a level in sight. */
function scrollTo(box: HTMLDivElement | null, y: number, level: number): void {
  if (!box) return;
  if (y < box.scrollTop) box.scrollTop = y;
  else if (y + level > box.scrollTop + box.clientHeight) box.scrollTop = y + level - box.clientHeight;
}

function paintsOf(canvas: HTMLCanvasElement, context: CanvasRenderingContext2D): Paints {
  const style = getComputedStyle(canvas);
  const known = new Map<string, string>();
  const read = (name: string): string => {
    let color = known.get(name);
    if (color === undefined) known.set(name, (color = style.getPropertyValue(name).trim() || "#888"));
    return color;
  };
  const { fill } = readPalette(canvas, context);
  return { read, category: (key) => fill("category", key, 0) };
}
