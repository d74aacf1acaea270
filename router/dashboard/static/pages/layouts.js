// Layouts: what each engine serves in, step times of the layouts, regret, and the layouts it had.

import { TimeChart } from '../chart.js';
import { CurveChart } from '../curves.js';
import { h, setText, show } from '../dom.js';
import { count, digits, milliseconds, percent, time } from '../format.js';
import { Table } from '../table.js';
import { Timeline } from '../timeline.js';

export const title = 'Layouts';
export const topics = ['layouts'];

const NAMES = { ep: 'experts whole (EP)', 'experts-tp': 'experts sharded (EXPERTS_TP)', tp: 'tensor-parallel (TP)' };
const LAYOUTS = ['ep', 'experts-tp', 'tp'];
const milliSeconds = (value) => milliseconds(value === null || value === undefined ? null : 1000 * value);
const ms = (seconds) => (seconds === null || seconds === undefined ? 'unknown' : milliseconds(1000 * seconds));

const some = (layers) => `${/[-,]/.test(layers) ? 'layers' : 'layer'} ${layers} sharded`;

/** Layout of an engine or of a span in a few words. */
function form(one, layers) {
  if (one.attention === 'tp') return one.sharded ? 'TP: attention and experts sharded' : 'TP attention, experts whole';
  if (!one.sharded) return 'EP: experts whole';
  return one.sharded === layers ? 'EXPERTS_TP: experts sharded' : some(one.sharded_layers ?? one.layers);
}

const kind = (one, layers) => (one.attention === 'tp' ? 'tp' : !one.sharded ? 'ep' : one.sharded === layers ? 'experts-tp' : 'mixed');

/** Largest regret of an engine: [seconds, layout]. */
function regret(row) {
  const options = row.choice?.options.filter((one) => !one.refusal) ?? [];
  return options.reduce((most, one) => (one.regret_seconds > most[0] ? [one.regret_seconds, one.layout] : most), [0, '']);
}

const ENGINES = (address) => [
  {
    title: 'Engine',
    value: (row, cell) => {
      cell.link ??= h('a', { href: address('layouts', row.engine) }, row.engine);
      return cell.link;
    },
    sort: (row) => row.engine,
  },
  { title: 'Layout', value: (row) => form(row, row.layers), sort: (row) => form(row, row.layers) },
  { title: 'Epoch', numeric: true, value: (row) => count(row.epoch), sort: (row) => row.epoch ?? -1 },
  { title: 'Choice', about: 'automatic: the planner switches when staying has cost more than a switch; by hand: only roost layout --set does.', value: (row) => (!row.choice ? 'not known' : row.choice.automatic ? `automatic (${row.choice.policy})` : 'by hand'), sort: (row) => String(row.choice?.automatic) },
  { title: 'Decoding sequences', numeric: true, value: (row) => count(row.choice?.running), sort: (row) => row.choice?.running ?? -1 },
  { title: 'Waiting', numeric: true, value: (row) => count(row.choice?.waiting), sort: (row) => row.choice?.waiting ?? -1 },
  { title: 'Largest regret', numeric: true, about: 'Time that the work since the last switch would have taken less in the best other layout.', value: (row) => (regret(row)[1] ? `${ms(regret(row)[0])} (${regret(row)[1]})` : '–'), sort: (row) => regret(row)[0] },
];

function shareOfCost(option) {
  return option.refusal || !option.cost_seconds ? null : option.regret_seconds / option.cost_seconds;
}

const OPTIONS = [
  { title: 'Layout', value: (row) => NAMES[row.layout] ?? row.layout },
  { title: 'Possible', value: (row) => (row.refusal ? `no: ${row.refusal}` : 'yes') },
  { title: 'Decode step now', numeric: true, value: (row) => (row.step_seconds === null ? 'unknown' : `${ms(row.step_seconds)} ± ${percent(row.deviation)}${row.uncertain ? ', uncertain' : ''}`) },
  { title: 'Regret so far', numeric: true, value: (row) => (row.refusal ? '–' : ms(row.regret_seconds)) },
  { title: 'Cost of a switch', numeric: true, about: 'Time that a switch would take from requests.', value: (row) => ms(row.cost_seconds) },
  { title: 'Regret of its cost', numeric: true, about: 'At 100 % the planner switches, if the choice is automatic.', value: (row) => percent(shareOfCost(row)) },
];

function crossings(choice) {
  if (!choice.curves.length) return '';
  if (!choice.crossings.length) return 'The measurements show no crossing.';
  return choice.crossings.map((one) => `At ${digits(one.sequences)} sequences ${one.below} and ${one.above} take equally long; below, ${one.below} is faster.`).join(' ');
}

/** Build the page. */
export function mount(root, { args, address, go }) {
  const verdict = h('p', { class: 'verdict' });
  const overview = h('section', { 'aria-label': 'Engines' });
  const choice = h('select', { id: 'engine' });
  const about = h('ul', { class: 'notes' });
  const charts = h('div', { class: 'charts' });
  const options = h('section', { 'aria-label': 'Options' });
  const curveTable = h('section', { 'aria-label': 'Curves' });
  const past = h('section', { 'aria-label': 'Layouts over time' });
  const detail = h('section', { 'aria-labelledby': 'engine-title', hidden: true },
    h('div', { class: 'bar-of-section' }, h('h2', { id: 'engine-title' }, 'Choice of the layout'), h('label', { for: 'engine' }, 'Engine'), choice),
    about, options, charts, curveTable, past);
  root.append(h('h1', {}, title), verdict, overview, detail);

  const engines = new Table(overview, { caption: 'Layout of each engine; choose one for its curves', columns: ENGINES(address), key: (row) => row.engine, empty: 'No engine reports experts.' });
  const optionTable = new Table(options, { caption: 'Layouts that the engine could be in, at its present load', columns: OPTIONS, key: (row) => row.layout, empty: 'The planner says nothing about this engine.' });
  const curves = new CurveChart(charts, { title: 'Decode step by the number of sequences' });
  const regrets = new TimeChart(charts, { title: 'Regret: time lost by staying', series: LAYOUTS.map((label) => ({ label, text: milliSeconds })), height: 240 });
  const pastLine = new Timeline(past, { title: 'Layouts over time', about: 'Blue: experts whole, orange: experts sharded, green: tensor-parallel, grey: some layers sharded.', empty: 'No change of layout in the log.' });
  const points = new Table(curveTable, {
    caption: 'Decode steps by the number of sequences', key: (row) => String(row.sequences), most: 10, empty: 'No step was measured.',
    columns: [{ title: 'Sequences', numeric: true, value: (row) => count(row.sequences) },
      ...LAYOUTS.map((layout) => ({ title: layout, unit: 'ms', numeric: true, value: (row) => (row[layout] === undefined ? '–' : `${digits(row[layout])}${row.best === layout ? ' (fastest)' : ''}`) }))],
  });
  const spanTable = new Table(past, {
    caption: 'Layouts that the engine had', key: (row) => `${row.at} ${row.epoch}`, empty: 'No handover in the log: the layout is the one shown above.',
    columns: [{ title: 'From', value: (row) => (row.at === null ? 'before' : time(row.at)) },
      { title: 'Layout', value: (row) => form(row, row.of) },
      { title: 'Epoch', numeric: true, value: (row) => (row.epoch === null ? '–' : count(row.epoch)) },
      { title: 'Plan', value: (row) => row.plan || '–' }],
  });
  let picture = null;
  let chosen = args[0] ?? null;
  choice.addEventListener('change', () => go('layouts', choice.value));

  const current = () => picture?.engines.find((one) => one.engine === chosen);

  function drawEngine(engine) {
    const said = engine.choice;
    const facts = [
      said && `Load: ${said.running} decoding sequences, ${said.waiting} waiting, ${count(said.context)} tokens of context.`,
      said?.decided && `Decision: ${said.decided}.`, said?.single_layers && `Single layers: ${said.single_layers.replace(/^single layers: /, '')}.`,
      said && crossings(said)].filter(Boolean);
    if (about.dataset.facts !== facts.join('\n')) {
      about.dataset.facts = facts.join('\n');
      show(about, facts.map((fact) => h('li', {}, fact)));
    }
    optionTable.update(said?.options ?? []);
    curves.update(said?.curves ?? [], said?.running);
    const rows = (said?.curves[0]?.sequences ?? []).map((sequences, at) => {
      const row = { sequences };
      for (const curve of said.curves) row[curve.layout] = curve.step_ms[at];
      row.best = said.curves.reduce((best, one) => (one.step_ms[at] < best.step_ms[at] ? one : best)).layout;
      return row;
    });
    points.update(rows);
    spanTable.update(engine.spans.map((one) => ({ ...one, of: engine.layers })).reverse());
    drawPast();
  }

  function drawPast() {
    const engine = current();
    if (!engine) return;
    const now = Date.now() / 1000;
    const begin = now - picture.history_seconds;
    const spans = engine.spans.length ? engine.spans : [{ at: null, attention: engine.attention, sharded: engine.sharded, layers: engine.sharded_layers }];
    const bars = spans.map((one, at) => ({
      begin: one.at ?? begin, end: spans[at + 1]?.at ?? now, kind: kind(one, engine.layers), text: form(one, engine.layers),
    }));
    pastLine.update([{ name: engine.engine, bars, marks: [] }], begin, now);
  }

  // A point each two seconds, also while nothing changes and no event comes.
  const ticking = setInterval(() => {
    const offered = current()?.choice?.options;
    if (offered?.length) regrets.add(Date.now() / 1000, LAYOUTS.map((layout) => offered.find((one) => one.layout === layout && !one.refusal)?.regret_seconds ?? null));
    drawPast();
  }, 2000);

  return {
    update(_, data) {
      picture = data;
      const behind = data.engines.filter((one) => one.choice?.options.some((option) => (shareOfCost(option) ?? 0) > 0.5));
      verdict.className = `verdict ${data.silence || behind.length ? 'warning' : 'well'}`;
      setText(verdict, data.silence ? `How layouts are chosen is not known: ${data.silence}`
        : behind.length ? `Regret nears the cost of a switch: ${behind.map((one) => one.engine).slice(0, 8).join(', ')}`
          : 'No engine has lost much time by its layout.');
      engines.update(data.engines);
      if (!args.length && !current()) chosen = data.engines[0]?.engine ?? null;
      const names = data.engines.map((one) => one.engine);
      if (choice.dataset.names !== names.join('\n')) {
        choice.dataset.names = names.join('\n');
        show(choice, names.map((name) => h('option', { value: name, selected: name === chosen }, name)));
      }
      const engine = current();
      detail.hidden = !engine;
      if (engine) drawEngine(engine);
    },
    close() {
      clearInterval(ticking);
      [curves, regrets, pastLine].forEach((one) => one.close());
    },
  };
}
