// Curves over a number of sequences by uPlot, in the colours of the page. The same figures are in a table.

import { h, setText } from './dom.js';
import { digits } from './format.js';

const LAYOUTS = ['ep', 'experts-tp', 'tp']; // in the order of their colours, everywhere on the page
const seriesOf = (layout) => LAYOUTS.indexOf(layout) + 1 || LAYOUTS.length + 1;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** update(curves, marked): curves are { layout, sequences, step_ms }; marked: a number of sequences. */
export class CurveChart {
  constructor(root, { title, height = 240 }) {
    this.height = height;
    this.holder = h('div', { class: 'plot', 'aria-hidden': 'true' });
    this.keys = h('p', { class: 'legend' });
    root.append(h('figure', { class: 'chart' }, h('figcaption', {}, title), this.keys, this.holder));
    this.resizing = new ResizeObserver(() => this.plot?.setSize({ width: this.holder.clientWidth, height }));
    this.resizing.observe(this.holder);
    this.redraw = () => this.draw();
    this.scheme = matchMedia('(prefers-color-scheme: dark)');
    window.addEventListener('themechange', this.redraw);
    this.scheme.addEventListener('change', this.redraw);
    this.last = null;
    this.drawn = '';
  }

  update(curves, marked) {
    const text = JSON.stringify([curves, marked]);
    if (text === this.drawn) return;
    this.drawn = text;
    this.last = { curves, marked };
    this.draw();
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    this.keys.replaceChildren();
    const width = this.holder.clientWidth;
    if (!this.last?.curves.length || !width) return;
    const { curves, marked } = this.last;
    curves.forEach((one) => this.keys.append(h('span', { class: `key key-${seriesOf(one.layout)}` }), `${one.layout}  `));
    const sequences = [...new Set(curves.flatMap((one) => one.sequences))].sort((a, b) => a - b);
    const data = [sequences, ...curves.map((one) => sequences.map((x) => {
      const at = one.sequences.indexOf(x);
      return at < 0 ? null : one.step_ms[at];
    }))];
    const axis = { stroke: colour('--muted'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui', labelFont: '11px system-ui' };
    this.plot = new window.uPlot({
      width, height: this.height, legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false, distr: 3, log: 2 }, y: { range: (_, __, most) => [0, most * 1.05] } },
      axes: [
        { ...axis, size: 30, labelSize: 18, label: 'decoding sequences', values: (_, values) => values.map((value) => (value === null ? '' : String(value))) },
        { ...axis, size: 46, labelSize: 18, label: 'decode step (ms)', values: (_, values) => values.map((value) => digits(value)) },
      ],
      series: [{}, ...curves.map((one) => ({ label: one.layout, stroke: colour(`--series-${seriesOf(one.layout)}`), width: 2, spanGaps: true, points: { show: true, size: 5 } }))],
      hooks: { draw: [(plot) => mark(plot, marked)] },
    }, data, this.holder);
  }

  close() {
    this.resizing.disconnect();
    window.removeEventListener('themechange', this.redraw);
    this.scheme.removeEventListener('change', this.redraw);
    this.plot?.destroy();
  }
}

/** Draw a vertical line at the present number of sequences. */
function mark(plot, sequences) {
  if (!(sequences >= 1)) return;
  const x = Math.round(plot.valToPos(sequences, 'x', true));
  const { ctx, bbox } = plot;
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = colour('--muted');
  ctx.setLineDash([6, 5]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}
