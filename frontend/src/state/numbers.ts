/** Numbers with grouped digits; the formatters are made once, since making one costs more than using it. */

const FORMATS = new Map<number, Intl.NumberFormat>();

export function decimals(value: number, digits: number): string {
  let format = FORMATS.get(digits);
  if (!format) {
    format = new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    FORMATS.set(digits, format);
  }
  return format.format(value).replace("-", "−");
}

export function grouped(count: number): string {
  return decimals(Math.round(count), 0);
}

/** "1 row", "2,000 rows". */
export function counted(count: number, one: string, many = `${one}s`): string {
  return `${grouped(count)} ${count === 1 ? one : many}`;
}
