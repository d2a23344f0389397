/** Categories and phases that lie beside one another differ, also for people who do not see red, green or blue. */
import { readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import { CATEGORIES } from "../../src/state/categories";

type Triple = [number, number, number];
type Matrix = [Triple, Triple, Triple];

/** Machado, Oliveira and Fernandes 2009, severity 1, on linear sRGB. */
const SIMULATIONS: Record<string, Matrix> = {
  protanopia: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deuteranopia: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritanopia: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};
const XYZ: Matrix = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]];

const times = (matrix: Matrix, v: Triple): Triple => matrix.map((row) => row[0] * v[0] + row[1] * v[1] + row[2] * v[2]) as Triple;
const radians = (degrees: number): number => (degrees * Math.PI) / 180;

function labOf(color: string, simulation: Matrix): Triple {
  const linear = [1, 3, 5].map((at) => {
    const c = parseInt(color.slice(at, at + 2), 16) / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  }) as Triple;
  const seen = times(simulation, linear).map((c) => Math.min(1, Math.max(0, c))) as Triple;
  const [x, y, z] = times(XYZ, seen);
  const f = (t: number): number => (t > 216 / 24389 ? Math.cbrt(t) : ((24389 / 27) * t + 16) / 116);
  const [fx, fy, fz] = [f(x / 0.95047), f(y), f(z / 1.08883)];
  return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)];
}

/** CIEDE2000 of two colors in CIELAB. */
function difference([l1, a1, b1]: Triple, [l2, a2, b2]: Triple): number {
  const mean = (Math.hypot(a1, b1) + Math.hypot(a2, b2)) / 2;
  const g = 0.5 * (1 - Math.sqrt(mean ** 7 / (mean ** 7 + 25 ** 7)));
  const polar = (a: number, b: number): [number, number] => [
    Math.hypot((1 + g) * a, b),
    ((Math.atan2(b, (1 + g) * a) * 180) / Math.PI + 360) % 360,
  ];
  const [[c1, h1], [c2, h2]] = [polar(a1, b1), polar(a2, b2)];
  const turn = c1 * c2 === 0 ? 0 : ((h2 - h1 + 540) % 360) - 180;
  const [c, l] = [(c1 + c2) / 2, (l1 + l2) / 2];
  const h = c1 * c2 === 0 ? h1 + h2 : h1 + turn / 2;
  const t =
    1 - 0.17 * Math.cos(radians(h - 30)) + 0.24 * Math.cos(radians(2 * h)) + 0.32 * Math.cos(radians(3 * h + 6)) - 0.2 * Math.cos(radians(4 * h - 63));
  const around = (((h % 360) + 360) % 360 - 275) / 25;
  const twist = -Math.sin(radians(60 * Math.exp(-(around ** 2)))) * 2 * Math.sqrt(c ** 7 / (c ** 7 + 25 ** 7));
  const dl = (l2 - l1) / (1 + (0.015 * (l - 50) ** 2) / Math.sqrt(20 + (l - 50) ** 2));
  const dc = (c2 - c1) / (1 + 0.045 * c);
  const dh = (2 * Math.sqrt(c1 * c2) * Math.sin(radians(turn / 2))) / (1 + 0.015 * c * t);
  return Math.sqrt(dl ** 2 + dc ** 2 + dh ** 2 + twist * dc * dh);
}

const css = readFileSync(new URL("../../src/views/style/theme.css", import.meta.url), "utf-8");
const [light, dark] = css.split(":root.dark").map((part) => new Map([...part.matchAll(/(--[\w-]+): (#[0-9a-f]{6});/g)].map((m) => [m[1]!, m[2]!])));
const THEMES = { light: light!, dark: new Map([...light!, ...dark!]) };
const PHASES = ["before", "other", "forward", "backward", "optimizer"];

const neighbors = (names: readonly string[]): [string, string][] => names.slice(1).map((name, i) => [names[i]!, name]);
const pairs = (names: readonly string[]): [string, string][] => names.flatMap((a, i) => names.slice(i + 1).map((b): [string, string] => [a, b]));
/** What most trainings stack on one another, as they have none of what stands between. */
const USUAL = ["parameter", "optimizer_state", "gradient", "activation", "temporary", "unknown"];
const LIE_TOGETHER: [string, [string, string][]][] = [
  ["--cat-", neighbors(CATEGORIES)],
  ["--cat-", neighbors(USUAL)],
  ["--phase-", pairs(PHASES)],
  ["--lane-", pairs(PHASES)],
];

describe("the measure", () => {
  it("is that of the published pairs", () => {
    expect(difference([50, 2.6772, -79.7751], [50, 0, -82.7485])).toBeCloseTo(2.0425, 4);
    expect(difference([50, 2.5, 0], [61, -5, 29])).toBeCloseTo(22.8977, 4);
    expect(difference([2.0776, 0.0795, -1.135], [0.9033, -0.0636, -0.5514])).toBeCloseTo(0.9082, 4);
  });
});

describe.each(Object.entries(THEMES))("in the %s theme", (_, colors) => {
  it.each(Object.entries(SIMULATIONS))("neighbors differ under %s", (_, simulation) => {
    const near = LIE_TOGETHER.flatMap(([prefix, both]) =>
      both.flatMap(([a, b]) => {
        const apart = difference(labOf(colors.get(prefix + a)!, simulation), labOf(colors.get(prefix + b)!, simulation));
        return apart < 10 ? [`${prefix}${a} ${b} ${apart.toFixed(1)}`] : [];
      }),
    );
    expect(near).toEqual([]);
  });
});
