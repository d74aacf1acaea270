// Fleet: what is wrong, the totals, and every engine with its ranks.

import { TimeChart } from '../chart.js';
import { h, setText, show } from '../dom.js';
import { count, milliseconds, percent, short } from '../format.js';
import { Table } from '../table.js';

export const title = 'Fleet';
export const topics = ['fleet'];

const STATES = {
  live: 'live', stale: 'reports stopped', saturated: 'saturated', drain: 'draining', breaker: 'breaker open',
  outlier: 'ejected', down: 'down',
};
const SEVERITIES = { critical: 'Critical', warning: 'Warning', info: 'Note' };

const sum = (values) => values.reduce((total, value) => total + value, 0);
const filling = (engine) => (engine.kv_blocks ? sum(engine.ranks.blocks) / (engine.kv_blocks * engine.ranks.blocks.length) : null);
const fullest = (engine) => (engine.kv_blocks ? Math.max(...engine.ranks.blocks) / engine.kv_blocks : null);

/** The state of an engine in a few words: the gravest of its ranks' states, with their number. */
function summary(engine) {
  if (engine.state !== 'live') return ['down', engine.state];
  for (const state of ['breaker', 'outlier', 'saturated', 'stale', 'drain']) {
    const ranks = engine.ranks.state.filter((one) => one === state).length;
    if (ranks) return [state, `${ranks === engine.ranks.state.length ? '' : `${ranks} of ${engine.ranks.state.length} ranks `}${STATES[state]}`];
  }
  return engine.handover_seconds ? ['handover', 'handover in progress'] : ['live', 'live'];
}

/** A bar with its share as text. */
function meter(cell, share) {
  if (!cell.meter) {
    cell.meter = { root: h('div', { class: 'meter' }), bar: h('div', { class: 'bar' }), text: h('span', {}) };
    cell.meter.root.append(h('div', { class: 'track', 'aria-hidden': 'true' }, cell.meter.bar), cell.meter.text);
  }
  cell.meter.bar.style.width = `${Math.min(100, 100 * (share ?? 0))}%`;
  cell.meter.bar.className = share > 0.9 ? 'bar high' : 'bar';
  setText(cell.meter.text, percent(share));
  return cell.meter.root;
}

function badge(cell, kind, text) {
  cell.badge ??= h('span');
  cell.badge.className = `badge ${kind}`;
  setText(cell.badge, text);
  return cell.badge;
}

const ENGINES = [
  { title: 'Engine', value: (row) => row.engine, sort: (row) => row.engine },
  { title: 'State', value: (row, cell) => badge(cell, ...summary(row)), sort: (row) => summary(row)[0] },
  { title: 'Kind', value: (row) => (row.static ? `${row.kind || 'openai'} (static)` : row.kind || '–'), sort: (row) => row.kind },
  { title: 'Ranks', numeric: true, value: (row) => count(row.ranks.state.length), sort: (row) => row.ranks.state.length },
  { title: 'Requests', numeric: true, value: (row) => count(sum(row.ranks.requests)), sort: (row) => sum(row.ranks.requests) },
  { title: 'Prefill queue', unit: 'tokens', numeric: true, about: 'Prompt tokens of its requests that are not computed yet.', value: (row) => short(sum(row.ranks.prefill_tokens)), sort: (row) => sum(row.ranks.prefill_tokens) },
  { title: 'KV filled', numeric: true, about: 'Share of the KV blocks that requests hold. Kept prefixes do not count: they give way.', value: (row, cell) => meter(cell, filling(row)), sort: (row) => filling(row) ?? -1 },
  { title: 'Fullest rank', numeric: true, value: (row) => percent(fullest(row)), sort: (row) => fullest(row) ?? -1 },
  { title: 'Layout', about: 'Attention (dp: data-parallel, tp: tensor-parallel), and whether each expert is whole on one rank or sharded over all.', value: (row) => row.layout ?? '–', sort: (row) => row.layout ?? '' },
  { title: 'Epoch', numeric: true, about: 'Number of handovers so far: changes of the placement of experts or of the layout.', value: (row) => epoch(row), sort: (row) => row.epoch ?? -1 },
  { title: 'Node', value: (row) => row.node, sort: (row) => row.node },
];

function epoch(row) {
  if (row.epoch === null) return '–';
  return row.priced_epoch === row.epoch || row.priced_epoch === null ? count(row.epoch) : `${row.epoch} (priced: ${row.priced_epoch})`;
}

/** The ranks of one engine, opened below its row. */
function ranks(engine) {
  const element = h('div', { class: 'ranks' });
  const about = h('p', { class: 'about' });
  element.append(about);
  const table = new Table(element, {
    caption: `Ranks of ${engine.engine}`,
    key: (row) => String(row.rank),
    columns: [
      { title: 'Rank', numeric: true, value: (row) => String(row.rank), sort: (row) => row.rank },
      { title: 'State', value: (row, cell) => badge(cell, row.state, STATES[row.state]), sort: (row) => row.state },
      { title: 'Requests', numeric: true, value: (row) => count(row.requests), sort: (row) => row.requests },
      { title: 'Prefill queue', unit: 'tokens', numeric: true, value: (row) => count(row.prefill), sort: (row) => row.prefill },
      { title: 'Tokens to emit', numeric: true, value: (row) => count(row.steps), sort: (row) => row.steps },
      { title: 'KV blocks', numeric: true, value: (row) => count(row.blocks), sort: (row) => row.blocks },
      { title: 'KV filled', numeric: true, value: (row, cell) => meter(cell, row.share), sort: (row) => row.share ?? -1 },
    ],
  });
  const update = (row) => {
    setText(about, `Models: ${row.models.join(', ')} · worker ${row.worker_id} · ${row.kv_blocks ? `${count(row.kv_blocks)} KV blocks per rank` : 'KV blocks unknown'}${row.handover_seconds ? ` · a handover adds about ${milliseconds(1000 * row.handover_seconds)}` : ''}`);
    table.update(row.ranks.state.map((state, rank) => ({
      rank,
      state,
      requests: row.ranks.requests[rank],
      prefill: row.ranks.prefill_tokens[rank],
      steps: row.ranks.steps[rank],
      blocks: row.ranks.blocks[rank],
      share: row.kv_blocks ? row.ranks.blocks[rank] / row.kv_blocks : null,
    })));
  };
  return { element, update };
}

function problemLine(problem) {
  const place = problem.engine === null ? '' : `${problem.engine}${problem.ranks.length ? ` rank${problem.ranks.length > 1 ? 's' : ''} ${problem.ranks.join(', ')}` : ''}: `;
  return h('li', { class: problem.severity },
    h('span', { class: `badge ${problem.severity}` }, SEVERITIES[problem.severity]), ' ',
    h('strong', {}, place), problem.what, problem.reason ? h('span', { class: 'reason' }, ` (${problem.reason})`) : null);
}

function tile(root, label) {
  const value = h('dd');
  const note = h('dd', { class: 'note' });
  root.append(h('div', { class: 'tile' }, h('dt', {}, label), value, note));
  return (text, more = '') => {
    setText(value, text);
    setText(note, more);
  };
}

/** Build the page. */
export function mount(root, { announce }) {
  const verdict = h('p', { class: 'verdict' });
  const list = h('ul', { class: 'problems' });
  const tiles = h('dl', { class: 'tiles' });
  const charts = h('div', { class: 'charts' });
  const find = h('input', { id: 'find', type: 'search', placeholder: 'name, node, model or state' });
  const engines = h('section', { 'aria-label': 'Engines' },
    h('div', { class: 'bar-of-section' }, h('h2', {}, 'Engines'), h('label', { for: 'find' }, 'Filter'), find));
  root.append(
    h('h1', {}, title),
    h('section', { 'aria-label': 'State' }, verdict, list),
    h('section', { 'aria-label': 'Totals' }, h('h2', { class: 'visually-hidden' }, 'Totals'), tiles, charts),
    engines);
  const shown = {
    engines: tile(tiles, 'Engines live'), ranks: tile(tiles, 'Ranks live'), requests: tile(tiles, 'Requests at ranks'),
    waiting: tile(tiles, 'Waiting for a place'), prefill: tile(tiles, 'Prefill queue'), kv: tile(tiles, 'KV filled'),
  };
  const load = new TimeChart(charts, { title: 'Requests at ranks', whole: true, series: [{ label: 'requests', text: (value) => count(value) }] });
  const kv = new TimeChart(charts, { title: 'KV filled', series: [{ label: 'share', text: (value) => percent(value) }] });
  const table = new Table(engines, {
    caption: 'Engines as this router sees them', columns: ENGINES, key: (row) => row.engine, detail: ranks,
    empty: 'No engine has joined.', sorted: { at: 0, down: false },
  });
  let picture = null;
  let gravest = null;
  const draw = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    table.update(picture.engines.filter((row) => {
      const text = [row.engine, row.node, row.kind, row.layout, summary(row)[1], ...row.models].join(' ').toLowerCase();
      return words.every((word) => text.includes(word));
    }));
  };
  find.addEventListener('input', () => picture && draw());

  function update(_, data) {
    picture = data;
    const { totals, problems } = data;
    const counts = Object.keys(SEVERITIES).map((severity) => problems.filter((one) => one.severity === severity).length);
    const text = counts[0] + counts[1]
      ? `${counts[0]} critical, ${counts[1]} ${counts[1] === 1 ? 'warning' : 'warnings'}`
      : 'Nothing is wrong.';
    setText(verdict, text);
    verdict.className = `verdict ${counts[0] ? 'critical' : counts[1] ? 'warning' : 'well'}`;
    if (gravest !== null && gravest !== text) announce(text);
    gravest = text;
    const lines = JSON.stringify(problems);
    if (list.dataset.lines !== lines) {
      list.dataset.lines = lines;
      show(list, problems.map(problemLine), data.more_problems ? h('li', {}, `and ${data.more_problems} more`) : null);
    }
    shown.engines(`${totals.live_engines} of ${totals.engines}`, data.models.join(', '));
    shown.ranks(`${totals.live_ranks} of ${totals.ranks}`);
    shown.requests(count(totals.requests), `${count(data.in_flight)} of them through this router`);
    shown.waiting(count(data.waiting), `at router ${data.router}`);
    shown.prefill(short(totals.prefill_tokens), 'tokens not computed yet');
    shown.kv(percent(totals.kv_share), totals.kv_blocks ? `${short(totals.blocks)} of ${short(totals.kv_blocks)} blocks` : 'blocks unknown');
    draw();
  }

  // A point each second, also while nothing changes and no event comes.
  const ticking = setInterval(() => {
    if (!picture) return;
    load.add(Date.now() / 1000, [picture.totals.requests]);
    kv.add(Date.now() / 1000, [picture.totals.kv_share]);
  }, 1000);

  return {
    update,
    close() {
      clearInterval(ticking);
      load.close();
      kv.close();
    },
  };
}
