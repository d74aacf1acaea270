// Bars over time as SVG, one lane per subject. The same facts are in a table beside it.

import { h, setText, show, svg } from './dom.js';
import { duration, time } from './format.js';

const LANE = 34;
const LEFT = 120;
const FOOT = 22;
const STEPS = [10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200];

/** Times of ticks between two Unix times, at most eight. */
export function ticks(begin, end) {
  const step = STEPS.find((one) => (end - begin) / one <= 8) ?? 86400;
  const first = Math.ceil(begin / step) * step;
  return Array.from({ length: Math.max(0, Math.floor((end - first) / step) + 1) }, (_, at) => first + at * step);
}

/**
 * title: heading. update(lanes, begin, end) draws: lanes are { name, bars, marks }, bars { begin, end, kind,
 * text, thin }, marks { at, kind, letter, text }; end of a bar null: it lasts. Kinds are CSS classes.
 */
export class Timeline {
  constructor(root, { title, about, empty }) {
    this.empty = empty;
    this.holder = h('div', { class: 'lanes' });
    this.about = h('p', { class: 'about' }, about);
    root.append(h('figure', { class: 'chart' }, h('figcaption', {}, title), this.about, this.holder));
    this.resizing = new ResizeObserver(() => this.draw());
    this.resizing.observe(this.holder);
    this.last = null;
  }

  update(lanes, begin, end) {
    this.last = { lanes, begin, end };
    this.draw();
  }

  draw() {
    const width = this.holder.clientWidth;
    if (!this.last || !width) return;
    const { lanes, begin, end } = this.last;
    if (!lanes.length) {
      show(this.holder, h('p', { class: 'empty' }, this.empty));
      return;
    }
    const height = lanes.length * LANE + FOOT;
    const x = (at) => LEFT + ((Math.min(Math.max(at, begin), end) - begin) / (end - begin)) * (width - LEFT - 8);
    const picture = svg('svg', { class: 'timeline', width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': this.described() });
    for (const at of ticks(begin, end)) {
      picture.append(
        svg('line', { class: 'tick', x1: x(at), x2: x(at), y1: 0, y2: height - FOOT }),
        svg('text', { class: 'tick-text', x: x(at), y: height - 6, 'text-anchor': 'middle' }, end - begin > 7200 ? time(at).slice(0, 5) : time(at)));
    }
    lanes.forEach((lane, row) => picture.append(this.lane(lane, row, x, width)));
    show(this.holder, picture);
  }

  lane({ name, bars, marks }, row, x, width) {
    const top = row * LANE;
    const { end: now } = this.last;
    const group = svg('g', {},
      svg('line', { class: 'tick', x1: 0, x2: width, y1: top + LANE - 0.5, y2: top + LANE - 0.5 }),
      svg('text', { class: 'lane-name', x: 4, y: top + LANE / 2 + 4 }, name.length > 16 ? `${name.slice(0, 15)}…` : name));
    for (const bar of bars) {
      const [from, to] = [x(bar.begin), x(bar.end ?? now)];
      const [y, high] = bar.thin ? [top + 20, 8] : [top + 7, LANE - 14];
      group.append(svg('rect', { class: `span ${bar.kind}`, x: from, y, width: Math.max(to - from, 3), height: high, rx: 2 }, svg('title', {}, bar.text)));
    }
    for (const mark of marks) {
      const at = x(mark.at);
      group.append(svg('g', { class: `mark ${mark.kind}` },
        svg('circle', { cx: at, cy: top + LANE / 2, r: 8 }),
        svg('text', { x: at, y: top + LANE / 2 + 4, 'text-anchor': 'middle' }, mark.letter),
        svg('title', {}, mark.text)));
    }
    return group;
  }

  described() {
    const { lanes, begin, end } = this.last;
    const bars = lanes.reduce((sum, lane) => sum + lane.bars.filter((bar) => !bar.thin).length, 0);
    return `${bars} bars in ${lanes.length} lanes over the last ${duration(end - begin)}; the table below lists them`;
  }

  say(text) {
    setText(this.about, text);
  }

  close() {
    this.resizing.disconnect();
  }
}
