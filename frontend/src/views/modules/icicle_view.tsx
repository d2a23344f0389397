import { useMemo } from "preact/hooks";
import type { Categories } from "../../api/types";
import type { Bar, Paints } from "../../draw/paint_flame";
import { navigate, route } from "../../state/app";
import { asPartOf, exactBytes, percent, withUnit } from "../../state/bytes";
import { inStackingOrder, total } from "../../state/categories";
import { type Icicle, icicleOf, wayTo } from "../../state/module_icicle";
import type { ModuleNode } from "../../state/module_tree";
import { cellText, moduleLabel, shortened, titleText, visible } from "../../state/names";
import { Category } from "../category";
import { FlameChart } from "../flame_chart";

interface Props {
  roots: ModuleNode[];
  filter: ((node: ModuleNode) => boolean) | null;
}

/** Modules under the modules that hold them, as wide as their bytes. */
export function IcicleView({ roots, filter }: Props) {
  const icicle = useMemo(() => icicleOf(roots), [roots]);
  const look = useMemo(() => moduleBars(icicle, filter), [icicle, filter]);
  const zoom = Math.max(0, icicle.key.indexOf(route.value.inside ?? ""));
  const zoomTo = (place: number): void => navigate({ inside: icicle.key[place] || undefined });
  const all = icicle.categories[0]!;
  return (
    <section class="card flame-card">
      <div class="row icicle-head">
        <Way icicle={icicle} zoom={zoom} onZoom={zoomTo} />
        <span class="keys" aria-hidden="true">
          {inStackingOrder(all).map(([key]) => (
            <span key={key} class="key">
              <Category of={key} />
            </span>
          ))}
        </span>
      </div>
      <FlameChart
        testid="icicle"
        level={28}
        tree={icicle}
        zoom={zoom}
        look={look}
        label={spoken(icicle)}
        tip={(place) => <BarTip icicle={icicle} place={place} zoom={zoom} />}
        tipKey={(place) => icicle.key[place]!}
        fresh={[icicle, zoom]}
        onZoom={zoomTo}
      />
      <p class="foot">
        width is bytes; a module's own part has nothing below it · click or Enter zooms in, Esc zooms out, arrow keys
        move from bar to bar
      </p>
    </section>
  );
}

/** From all memory to what is zoomed to; each part leads back to it. */
function Way({ icicle, zoom, onZoom }: { icicle: Icicle; zoom: number; onZoom: (place: number) => void }) {
  return (
    <nav class="way grow" aria-label="Zoomed to">
      {wayTo(icicle.parent, zoom).map((place) => {
        const name = shortened(visible(icicle.name[place]!), 40);
        const bytes = total(icicle.categories[place]!);
        return (
          <span key={place}>
            {place > 0 && <span class="muted"> › </span>}
            {place === zoom ? (
              <b data-testid="icicle-zoomed">{name}</b>
            ) : (
              <button type="button" class="quiet" data-testid="icicle-way" onClick={() => onZoom(place)}>
                {name}
              </button>
            )}
            {place === zoom && (
              <span class="muted" title={exactBytes(bytes)}>
                {" "}
                {asPartOf(total(icicle.categories[0]!), bytes)}
              </span>
            )}
          </span>
        );
      })}
    </nav>
  );
}

/** A bar in words: its exact bytes, its shares, and what they are. */
function BarTip({ icicle, place, zoom }: { icicle: Icicle; place: number; zoom: number }) {
  const node = icicle.node[place];
  const bytes = total(icicle.categories[place]!);
  const inside = icicle.bytes.reduce((sum, size, one) => (icicle.parent[one] === place ? sum + size : sum), 0);
  const parts = inStackingOrder(icicle.categories[place]!).sort((a, b) => b[1] - a[1]);
  return (
    <>
      <div class="tip-bytes">
        <strong>{asPartOf(total(icicle.categories[0]!), bytes)}</strong> · {exactBytes(bytes)}
      </div>
      <div>
        {percent(bytes, total(icicle.categories[0]!))} of all
        {zoom > 0 && place > 0 && `, ${percent(bytes, total(icicle.categories[zoom]!))} of what is zoomed to`}
      </div>
      {inside > 0 && inside < bytes && <div>{exactBytes(bytes - inside)} its own</div>}
      {node && (
        <div class="tip-frame">
          <b>{titleText(moduleLabel(node.label))}</b>
          {node.layers !== null && ` ×${node.layers}`} {node.className && titleText(node.className)}
        </div>
      )}
      <dl class="tip-parts">
        {parts.map(([key, size]) => (
          <div key={key}>
            <dt>
              <Category of={key} />
            </dt>
            <dd>{exactBytes(size)}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}

/** The picture in words: the widest modules. */
function spoken(icicle: Icicle): string {
  const all = total(icicle.categories[0]!);
  const widest = icicle.id
    .filter((place) => icicle.node[place]?.key)
    .slice(0, 400)
    .sort((a, b) => icicle.bytes[b]! - icicle.bytes[a]!)
    .slice(0, 6)
    .map((place) => `${visible(icicle.node[place]!.label).slice(0, 60)} ${percent(total(icicle.categories[place]!), all)}`);
  return `Modules, ${withUnit(all)} (${exactBytes(all)}) at the peak. ${widest.join(", ")}. Arrow keys walk, Enter zooms.`;
}

/** How modules look in the icicle: tinted like their largest category, and split by category along the edge. */
const TINT = 0.3;

type Filter = ((node: ModuleNode) => boolean) | null;

function moduleBars(icicle: Icicle, filter: Filter): (paints: Paints) => (place: number) => Bar {
  // Once, not on every movement of the pointer.
  const all = icicle.categories.map(sharesOf);
  const words = icicle.node.map((node, place) => ({
    name: cellText(icicle.name[place]!),
    more: cellText(node?.className ?? ""),
    found: filter && node ? filter(node) : undefined,
  }));
  return ({ read, category }) =>
    (place) => {
      const node = icicle.node[place]!;
      const { shares, largest } = all[place]!;
      return {
        fill: node ? category(largest) : read("--flame-root"),
        ...(node && { tint: TINT }),
        split: shares.map(([key, share]) => [category(key), share]),
        ...words[place]!,
        strong: node === null,
        ink: read("--text"),
      };
    };
}

function sharesOf(categories: Categories): { shares: [string, number][]; largest: string } {
  const parts = inStackingOrder(categories);
  const whole = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  const [largest] = parts.reduce((top, part) => (part[1] > top[1] ? part : top), ["unknown", 0]);
  return { shares: parts.map(([key, bytes]) => [key, bytes / whole]), largest };
}
