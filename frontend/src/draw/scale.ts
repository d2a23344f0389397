/** Linear scales and round ticks. */

export interface Scale {
  (value: number): number;
  invert: (pixel: number) => number;
  domain: readonly [number, number];
  range: readonly [number, number];
}

export function linear(domain: readonly [number, number], range: readonly [number, number]): Scale {
  const [d0, d1] = domain;
  const [r0, r1] = range;
  const slope = d1 === d0 ? 0 : (r1 - r0) / (d1 - d0);
  const scale = (value: number): number => r0 + (value - d0) * slope;
  return Object.assign(scale, {
    invert: (pixel: number): number => (slope === 0 ? d0 : d0 + (pixel - r0) / slope),
    domain,
    range,
  });
}

/** 1, 2 or 5 times a power of ten: the smallest that gives at most `most` steps over the span. */
export function roundStep(span: number, most: number): number {
  if (!(span > 0) || most < 1) return 1;
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 5, 10].find((f) => f * power >= rough * (1 - 1e-12)) ?? 10;
  return factor * power;
}

/** Round values within [from, to], in units of `size`. */
export function ticks(from: number, to: number, most: number, size = 1): number[] {
  const step = roundStep((to - from) / size, most) * size;
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.floor(to / step + 1e-9);
  const count = Math.min(1000, last - first + 1);
  return Array.from({ length: Math.max(0, count) }, (_, i) => (first + i) * step);
}

/** Decimals that tell neighboring ticks apart. */
export function tickDecimals(step: number): number {
  if (!(step > 0)) return 0;
  return Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
}
