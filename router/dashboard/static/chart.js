// Time series by uPlot, in the colours of the page, with a text alternative.

import { h, setText } from './dom.js';
import { time } from './format.js';

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6]; // between lines of a count's axis
const COLOURS = ['--series-1', '--series-2', '--series-3', '--series-4'];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * A line chart of the last minutes. title: of the figure; series: [{ label, text(value) }]; whole: values are
 * counts; seconds: how much is kept. `add(unix, values)` adds a point; `describe()` is read to those who cannot see the lines.
 */
export class TimeChart {
  constructor(root, { title, series, whole = false, seconds = 300, height = 150 }) {
    Object.assign(this, { title, series, whole, seconds, height });
    this.data = [[], ...series.map(() => [])];
    this.holder = h('div', { class: 'plot', 'aria-hidden': 'true' });
    this.text = h('p', { class: 'legend' });
    root.append(h('figure', { class: 'chart' }, h('figcaption', {}, title), this.text, this.holder));
    this.keys = series.map((one, at) => {
      const value = h('span', { class: 'value' });
      this.text.append(h('span', { class: `key key-${at + 1}` }), `${one.label} `, value, ' ');
      return value;
    });
    this.resizing = new ResizeObserver(() => this.plot?.setSize({ width: this.holder.clientWidth, height }));
    this.resizing.observe(this.holder);
    this.redraw = () => this.draw();
    this.scheme = matchMedia('(prefers-color-scheme: dark)');
    window.addEventListener('themechange', this.redraw);
    this.scheme.addEventListener('change', this.redraw);
  }

  add(unix, values) {
    this.data[0].push(unix);
    values.forEach((value, at) => this.data[at + 1].push(value));
    while (this.data[0][0] < unix - this.seconds) this.data.forEach((column) => column.shift());
    this.series.forEach((one, at) => setText(this.keys[at], one.text(values[at])));
    if (this.plot) this.plot.setData(this.data);
    else this.draw();
  }

  draw() {
    if (!this.data[0].length || !this.holder.clientWidth) return;
    this.plot?.destroy();
    const axis = { stroke: colour('--muted'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui' };
    this.plot = new window.uPlot({
      width: this.holder.clientWidth,
      height: this.height,
      legend: { show: false },
      cursor: { show: false },
      scales: { y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
      axes: [{ ...axis, size: 28, space: 90, values: (_, ticks) => ticks.map(time) }, { ...axis, size: 52, space: 34, ...(this.whole ? { incrs: WHOLE } : {}), values: (_, ticks) => ticks.map(this.series[0].text) }],
      series: [{}, ...this.series.map((one, at) => ({ label: one.label, stroke: colour(COLOURS[at]), width: 2, points: { show: false } }))],
    }, this.data, this.holder);
  }

  close() {
    this.resizing.disconnect();
    window.removeEventListener('themechange', this.redraw);
    this.scheme.removeEventListener('change', this.redraw);
    this.plot?.destroy();
  }
}
