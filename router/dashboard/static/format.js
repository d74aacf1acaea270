// Figures for people: short, with units, the same everywhere.

const grouped = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });

/** 1234567 -> "1,234,567"; null -> "–". */
export function count(value) {
  return value === null || value === undefined ? '–' : grouped.format(value);
}

/** 1234567 -> "1.23 M". */
export function short(value) {
  if (value === null || value === undefined) return '–';
  for (const [size, unit] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']]) {
    if (Math.abs(value) >= size) return `${digits(value / (unit === 'k' ? 1e3 : size))} ${unit}`;
  }
  return grouped.format(value);
}

/** Three significant digits, without an exponent. */
export function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

/** Bytes in binary units. */
export function bytes(value) {
  if (value === null || value === undefined) return '–';
  for (const [size, unit] of [[2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) {
    if (value >= size) return `${digits(value / size)} ${unit}`;
  }
  return `${count(value)} B`;
}

/** Share of 1 -> "12.3 %". */
export function percent(share) {
  return share === null || share === undefined ? '–' : `${(100 * share).toFixed(1)} %`;
}

/** Milliseconds: "0.42 ms", "1.25 s". */
export function milliseconds(value) {
  if (value === null || value === undefined) return '–';
  return Math.abs(value) >= 1000 ? `${digits(value / 1000)} s` : `${digits(value)} ms`;
}

/** Seconds as a duration: "12 s", "3 min", "2 h". */
export function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** Unix seconds as the local time of day. */
export function time(unix) {
  return new Date(1000 * unix).toLocaleTimeString('en-GB');
}
