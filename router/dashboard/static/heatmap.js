// A heat map on a canvas: pointer and arrow keys read single cells, a legend gives the scale with its unit.

import { h, setText, show } from './dom.js';

const LIGHT = { amount: ['#f2f6fb', '#9cc4e4', '#2f7fb8', '#0b3c6f'], signed: ['#1f5fa8', '#eceff3', '#b4540a'] };
const DARK = { amount: ['#1b2735', '#23537d', '#4a9bd4', '#d6ecff'], signed: ['#5fb0f0', '#2a3442', '#f59a45'] };
const ROW_HEIGHT = 22;
const MOST_HEIGHT = 420;
const LEAST_EXTENT = 0.25; // in doublings: smaller differences stay pale

/** Return the bytes of a map of the router: { rows, columns, unit, levels }. */
export function decoded(map) {
  return { ...map, levels: Uint8Array.from(atob(map.levels), (letter) => letter.charCodeAt(0)) };
}

const isDark = () => getComputedStyle(document.documentElement).colorScheme.includes('dark');
const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** The colour at a place from 0 to 1 on a ramp of colours. */
function blend(ramp, place) {
  const at = Math.min(Math.max(place, 0), 1) * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2);
  const [one, two] = [parts(ramp[low]), parts(ramp[low + 1])];
  return one.map((value, part) => Math.round(value + (two[part] - value) * (at - low)));
}

/**
 * title, about: heading and one sentence. rows, columns: names of the axes. scale: 'amount' from 0 up, or
 * 'signed': under and over 1, in doublings. least: end of an amount's scale at least. unit: of the values. read(row, column, value) -> text of a cell.
 */
export class HeatMap {
  constructor(root, { title, about, rows, columns, scale = 'amount', least = 1e-9, unit, text, read }) {
    Object.assign(this, { scale, least, text, read });
    this.map = null;
    this.cell = null;
    this.canvas = h('canvas', { class: 'cells' });
    this.cursor = h('div', { class: 'cursor', hidden: true });
    this.plate = h('div', {
      class: 'plate', tabindex: '0', role: 'application', 'aria-roledescription': 'heat map',
      'aria-label': `${title}. Arrow keys read single cells.`,
    }, this.canvas, this.cursor);
    this.readout = h('output', { class: 'readout' }, 'Point at a cell, or use the arrow keys.');
    this.ramp = h('canvas', { class: 'ramp', width: 160, height: 10 });
    this.ends = [h('span'), h('span')];
    this.note = h('p', { class: 'about' }, about);
    root.append(h('figure', { class: 'chart map' },
      h('figcaption', {}, title), this.note,
      h('div', { class: 'axes' },
        h('span', { class: 'axis-rows', 'aria-hidden': 'true' }, `${rows} ↓`),
        h('span', { class: 'axis-columns', 'aria-hidden': 'true' }, `${columns} →`)),
      this.plate,
      h('div', { class: 'map-foot' }, this.readout,
        h('div', { class: 'map-legend' }, this.ends[0], this.ramp, this.ends[1], h('span', { class: 'muted' }, unit)))));
    this.plate.addEventListener('pointermove', (event) => this.point(event));
    this.plate.addEventListener('pointerdown', (event) => this.point(event));
    this.plate.addEventListener('keydown', (event) => this.key(event));
    this.redraw = () => this.draw();
    this.resizing = new ResizeObserver(this.redraw);
    this.resizing.observe(this.plate);
    this.scheme = matchMedia('(prefers-color-scheme: dark)');
    window.addEventListener('themechange', this.redraw);
    this.scheme.addEventListener('change', this.redraw);
  }

  /** Show a map: { rows, columns, unit, levels } with levels as bytes. */
  update(map) {
    this.map = map;
    this.draw();
    if (this.cell && this.cell[0] < map.rows && this.cell[1] < map.columns) this.at(...this.cell);
    else this.cell = null;
  }

  value(row, column) {
    return this.map.levels[row * this.map.columns + column] * this.map.unit;
  }

  /** Place of a value on the ramp, 0 to 1. */
  place(value, end) {
    if (this.scale === 'amount') return Math.sqrt(value / end);
    return 0.5 + Math.log2(Math.max(value, 2 ** -end)) / end / 2;
  }

  end() {
    let [most, least] = [0, Infinity];
    for (const level of this.map.levels) {
      if (level > most) most = level;
      if (level < least) least = level;
    }
    if (this.scale === 'amount') return Math.max(most * this.map.unit, this.least);
    const doublings = [most, Math.max(least, 1)].map((level) => Math.abs(Math.log2(level * this.map.unit)));
    return Math.min(Math.max(LEAST_EXTENT, ...doublings), 3);
  }

  draw() {
    const width = this.plate.clientWidth;
    if (!this.map || !width) return;
    const { rows, columns, levels, unit } = this.map;
    const ramp = (isDark() ? DARK : LIGHT)[this.scale];
    const end = this.end();
    const colours = Array.from({ length: 256 }, (_, level) => blend(ramp, this.place(level * unit, end)));
    const image = new ImageData(columns, rows);
    levels.forEach((level, at) => image.data.set([...colours[level], 255], 4 * at));
    const small = new OffscreenCanvas(columns, rows);
    small.getContext('2d').putImageData(image, 0, 0);
    const height = Math.min(Math.max(rows * ROW_HEIGHT, 48), MOST_HEIGHT);
    const dense = window.devicePixelRatio || 1;
    this.canvas.width = width * dense;
    this.canvas.height = height * dense;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext('2d');
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, this.canvas.width, this.canvas.height);
    this.legend(ramp, end);
    this.mark();
  }

  legend(ramp, end) {
    const context = this.ramp.getContext('2d');
    for (let x = 0; x < this.ramp.width; x += 1) {
      context.fillStyle = `rgb(${blend(ramp, x / (this.ramp.width - 1)).join(' ')})`;
      context.fillRect(x, 0, 1, this.ramp.height);
    }
    setText(this.ends[0], this.scale === 'amount' ? '0' : this.text(2 ** -end));
    setText(this.ends[1], this.text(this.scale === 'amount' ? end : 2 ** end));
  }

  point(event) {
    if (!this.map) return;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.map.rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.map.columns);
    if (row >= 0 && row < this.map.rows && column >= 0 && column < this.map.columns) this.at(row, column);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!this.map || (!step && event.key !== 'Home' && event.key !== 'End')) return;
    event.preventDefault();
    const [row, column] = this.cell ?? [0, 0];
    if (event.key === 'Home') this.at(row, 0);
    else if (event.key === 'End') this.at(row, this.map.columns - 1);
    else if (!this.cell) this.at(0, 0);
    else {
      this.at(
        Math.min(Math.max(row + step[0], 0), this.map.rows - 1),
        Math.min(Math.max(column + step[1], 0), this.map.columns - 1),
      );
    }
  }

  at(row, column) {
    this.cell = [row, column];
    setText(this.readout, this.read(row, column, this.value(row, column)));
    this.mark();
  }

  mark() {
    this.cursor.hidden = this.cell === null;
    if (this.cell === null) return;
    const [row, column] = this.cell;
    const { style } = this.cursor;
    const [wide, high] = [this.canvas.clientWidth / this.map.columns, this.canvas.clientHeight / this.map.rows];
    style.left = `${column * wide}px`;
    style.top = `${row * high}px`;
    style.width = `${Math.max(wide, 4)}px`;
    style.height = `${Math.max(high, 4)}px`;
  }

  /** Say that there is nothing to show, and why. */
  clear(why) {
    this.map = null;
    this.cell = null;
    this.cursor.hidden = true;
    this.canvas.getContext('2d').clearRect(0, 0, this.canvas.width, this.canvas.height);
    show(this.readout, why);
  }

  close() {
    this.resizing.disconnect();
    window.removeEventListener('themechange', this.redraw);
    this.scheme.removeEventListener('change', this.redraw);
  }
}
