import type { Categories } from "../api/types";
import { colorVariable } from "../draw/palette";
import { type Unit, withUnit } from "../state/bytes";
import { categoryLabel, inStackingOrder, total } from "../state/categories";

/** The color of a key as a style; unknown is hatched. */
export function paint(by: string, key: string, index = 0): { background: string } {
  const name = colorVariable(by, key, index);
  return { background: name === "--cat-unknown" ? "var(--hatch)" : `var(${name})` };
}

export function Swatch({ by = "category", of, index = 0 }: { by?: string; of: string; index?: number }) {
  return <span class="swatch" style={paint(by, of, index)} aria-hidden="true" />;
}

/** A category by its color and name. */
export function Category({ of }: { of: string }) {
  return (
    <>
      <Swatch of={of} />
      {categoryLabel(of)}
    </>
  );
}

/** What the colors of a table's bars are, where no column or row says it. */
export function CategoryKey({ keys }: { keys: Iterable<string> }) {
  const drawn = inStackingOrder(Object.fromEntries([...keys].map((key) => [key, 1])));
  return (
    <ul class="legend" data-testid="category-key" aria-label="Colors of the bars">
      {drawn.map(([key]) => (
        <li key={key} data-key={key}>
          <Category of={key} />
        </li>
      ))}
    </ul>
  );
}

interface BarProps {
  categories: Categories;
  /** Bytes that fill the whole width. */
  full: number;
  unit: Unit;
  tall?: boolean;
}

/** A bar of categories in stacking order; its text says the same. */
export function CategoryBar({ categories, full, unit, tall = false }: BarProps) {
  const parts = inStackingOrder(categories);
  const words = parts.map(([key, bytes]) => `${categoryLabel(key)} ${withUnit(bytes, unit)}`).join(", ");
  const width = full > 0 ? Math.min(100, (100 * total(categories)) / full) : 0;
  return (
    <span class={tall ? "bar tall" : "bar"} role="img" aria-label={words || "nothing"} title={words}>
      <span class={width < 12 ? "fill" : "fill parted"} style={{ width: `${width}%` }}>
        {parts.map(([key, bytes]) => (
          <span key={key} style={{ ...paint("category", key), flexGrow: bytes }} />
        ))}
      </span>
    </span>
  );
}
