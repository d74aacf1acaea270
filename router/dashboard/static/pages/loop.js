// Loop: whether the planner acts, what it decided, its plans over time, and pausing it.

import { h, setText, show } from '../dom.js';
import { bytes, count, digits, duration, milliseconds, percent, time } from '../format.js';
import { Table } from '../table.js';
import { Timeline } from '../timeline.js';

export const title = 'Loop';
export const topics = ['loop'];

const SPANS = [[600, '10 minutes'], [3600, '1 hour'], [21600, '6 hours']];
const MOST_LANES = 12;
const LETTERS = { kept: '✓', harmful: '✕', unknown: '?' };
const ORIGINS = { planner: 'planner', operator: 'operator', rollback: 'rollback' };
const PAUSED = 'Until it is resumed the planner begins no plan and undoes none. Commands of operators are carried out, a running plan is completed and evaluated.';
const RESUMED = 'The planner will plan again and carry out what pays, within its byte budget.';

/** State of the loop in a sentence: [kind, sentence]. */
function judged({ loop, silence }) {
  if (!loop) return ['warning', `The loop's state is not known: ${silence}`];
  const stale = silence ? ` (not current: ${silence})` : '';
  if (loop.paused) {
    const since = loop.paused_at ? ` since ${time(loop.paused_at)}` : '';
    return ['warning', `Paused${since}${loop.paused_reason ? `: ${loop.paused_reason}` : ''}${stale}`];
  }
  if (!loop.automatic) return ['', `It acts on request only ([planner] automatic is false)${stale}`];
  return [silence ? 'warning' : 'well', `Automatic: policy ${loop.policy}, plans every ${duration(loop.cycle_seconds)}${stale}`];
}

/** Outcome of a plan: [badge kind, words]. */
function outcome(plan) {
  if (plan.state === 'aborted') return ['warning', 'aborted'];
  if (plan.verdict) return [{ kept: 'live', harmful: 'critical', unknown: '' }[plan.verdict] ?? '', plan.verdict];
  return plan.state === 'under way' ? ['handover', 'under way'] : ['', 'committed'];
}

const kindOf = (plan) => (plan.state === 'aborted' ? 'aborted' : plan.origin === 'rollback' ? 'rollback' : plan.origin);

/** Change of the step time in per cent; null: not known. */
const change = (before, after) => (before && after && before.step_seconds > 0 ? after.step_seconds / before.step_seconds - 1 : null);
const signed = (share) => (share === null ? '–' : `${share > 0 ? '+' : ''}${(100 * share).toFixed(1)} %`);
const seconds = (figures) => (figures ? milliseconds(1000 * figures.step_seconds) : '–');

function badge(cell, kind, text) {
  cell.badge ??= h('span');
  cell.badge.className = `badge ${kind}`;
  setText(cell.badge, text);
  return cell.badge;
}

/** Bytes against the budget, as a bar and text. */
function budget(cell, spent, whole) {
  if (!cell.meter) {
    cell.meter = { root: h('div', { class: 'meter' }), bar: h('div', { class: 'bar' }), text: h('span', {}) };
    cell.meter.root.append(h('div', { class: 'track', 'aria-hidden': 'true' }, cell.meter.bar), cell.meter.text);
  }
  const share = whole ? spent / whole : 0;
  cell.meter.bar.style.width = `${Math.min(100, 100 * share)}%`;
  cell.meter.bar.className = share > 0.9 ? 'bar high' : 'bar';
  setText(cell.meter.text, `${bytes(spent)} of ${bytes(whole)}`);
  return cell.meter.root;
}

const FIGURES = [
  ['Step', (one) => milliseconds(1000 * one.step_seconds)],
  ['Remote ranks per token', (one) => digits(one.remote_ranks)],
  ['Served locally', (one) => percent(one.local)],
  ['Balance', (one) => digits(one.balance)],
];

/** Figures of a plan before and after, predicted and measured. */
function figures(plan) {
  const columns = [['Predicted before', plan.predicted_before], ['Predicted after', plan.predicted_after],
    ['Measured before', plan.measured_before], ['Measured after', plan.measured_after]];
  if (columns.every(([, one]) => one === null)) return null;
  return h('table', { class: 'small-table' }, h('caption', {}, 'Prediction and measurement'),
    h('thead', {}, h('tr', {}, h('td'), columns.map(([name]) => h('th', { scope: 'col', class: 'numeric' }, name)))),
    h('tbody', {}, FIGURES.map(([name, text]) => h('tr', {}, h('th', { scope: 'row' }, name),
      columns.map(([, one]) => h('td', { class: 'numeric' }, one ? text(one) : '–'))))));
}

function handovers(plan) {
  if (!plan.bars.length) return null;
  return h('table', { class: 'small-table' }, h('caption', {}, `Handovers${plan.bars.length < plan.done ? ` (the last ${plan.bars.length})` : ''}`),
    h('thead', {}, h('tr', {}, ['Number', 'Epoch', 'Begun', 'Staged', 'In force', 'Bytes'].map((name) => h('th', { scope: 'col' }, name)))),
    h('tbody', {}, plan.bars.map((one) => h('tr', {}, h('th', { scope: 'row' }, String(one.number + 1)), h('td', {}, count(one.epoch)),
      h('td', {}, time(one.begun_at)), h('td', {}, time(one.staged_at)), h('td', {}, one.committed_at ? time(one.committed_at) : '–'), h('td', {}, bytes(one.bytes))))));
}

/** Everything about one plan, opened below its row. */
function details(plan) {
  const element = h('div');
  let last = '';
  const update = (row) => {
    const text = JSON.stringify(row);
    if (text === last) return;
    last = text;
    const turned = [row.to_sharded && `layers ${row.to_sharded} become sharded`, row.to_whole && `layers ${row.to_whole} become whole`, row.attention && `attention becomes ${row.attention}`].filter(Boolean);
    show(element,
      row.reason ? h('p', {}, row.reason) : null,
      turned.length ? h('p', {}, `Layout: ${turned.join('; ')}`) : null,
      row.fault ? h('p', { class: 'error' }, row.fault) : null,
      row.verdict_reason ? h('p', {}, `Verdict ${row.verdict}${row.verdict_at ? ` at ${time(row.verdict_at)}` : ''}: ${row.verdict_reason}`) : null,
      figures(row), handovers(row));
  };
  update(plan);
  return { element, update };
}

const PLANS = [
  { title: 'Begun', value: (row) => time(row.at), sort: (row) => row.at },
  { title: 'Engine', value: (row) => row.engine, sort: (row) => row.engine },
  { title: 'Plan', value: (row) => row.plan, sort: (row) => row.plan },
  { title: 'By', value: (row) => (row.policy ? `${ORIGINS[row.origin]} (${row.policy})` : ORIGINS[row.origin]), sort: (row) => row.origin },
  { title: 'Outcome', about: 'committed: all handovers are in force; kept or harmful: the verdict after measurement.', value: (row, cell) => badge(cell, ...outcome(row)), sort: (row) => outcome(row)[1] },
  { title: 'Handovers', numeric: true, value: (row) => (row.handovers ? `${row.done} of ${row.handovers}` : '–'), sort: (row) => row.handovers },
  { title: 'Bytes', numeric: true, value: (row) => bytes(row.bytes), sort: (row) => row.bytes },
  { title: 'Step predicted', numeric: true, about: 'Change of the step time that the plan promised; none for plans of operators.', value: (row) => signed(change(row.predicted_before, row.predicted_after)), sort: (row) => change(row.predicted_before, row.predicted_after) ?? 9 },
  { title: 'Step measured', numeric: true, about: 'Change of the step time that was measured after it. A harmful plan is rolled back.', value: (row) => signed(change(row.measured_before, row.measured_after)), sort: (row) => change(row.measured_before, row.measured_after) ?? 9 },
];

const engineColumns = (loop) => [
  { title: 'Engine', value: (row) => row.engine, sort: (row) => row.engine },
  { title: 'Epoch', numeric: true, value: (row) => count(row.epoch), sort: (row) => row.epoch },
  { title: 'Trust in predictions', numeric: true, about: 'Factor on predicted gains. It falls when plans gain less than was promised, and recovers in hours.', value: (row) => percent(row.plan_discount), sort: (row) => row.plan_discount },
  { title: 'Bytes in this budget interval', numeric: true, about: 'Copied by automatic plans, against what they may copy.', value: (row, cell) => budget(cell, row.spent_bytes, loop().budget_bytes), sort: (row) => row.spent_bytes },
  { title: 'Bytes in all', numeric: true, value: (row) => bytes(row.moved_bytes), sort: (row) => row.moved_bytes },
  { title: 'Step at start', numeric: true, about: 'Step time in the first window that was measured since the engine started.', value: (row) => seconds(row.at_start), sort: (row) => row.at_start?.step_seconds ?? 0 },
  { title: 'Step now', numeric: true, value: (row) => seconds(row.measured), sort: (row) => row.measured?.step_seconds ?? 0 },
  { title: 'Balance', numeric: true, about: 'Mean over highest load of the ranks: 1 is even.', value: (row) => (row.measured ? digits(row.measured.balance) : '–'), sort: (row) => row.measured?.balance ?? 0 },
  { title: 'Homes', numeric: true, about: 'Groups of requests for which the engine has preferred ranks.', value: (row) => count(row.homes), sort: (row) => row.homes },
  { title: 'Resting experts', numeric: true, about: 'Experts that moved lately and stay for a while, so that nothing moves back and forth.', value: (row) => count(row.resting), sort: (row) => row.resting },
  { title: 'Last decision', value: (row) => `${row.decided_at ? `${time(row.decided_at)} ` : ''}${row.decided || 'none yet'}${row.on_request ? ' (on request only)' : ''}` },
];

/** Bars and marks of the plans, one lane per engine; the engines with the newest plans. */
function lanes(plans, begin, end) {
  const byEngine = new Map();
  for (const plan of plans) {
    if ((plan.ended_at ?? end) < begin && (plan.verdict_at ?? 0) < begin) continue;
    if (!byEngine.has(plan.engine)) {
      if (byEngine.size === MOST_LANES) continue;
      byEngine.set(plan.engine, { name: plan.engine, bars: [], marks: [] });
    }
    const lane = byEngine.get(plan.engine);
    const [, words] = outcome(plan);
    const until = plan.ended_at ?? (plan.state === 'under way' ? null : plan.at);
    lane.bars.push({ begin: plan.at, end: until, kind: kindOf(plan), text: `${plan.plan} by ${plan.origin}: ${words}, ${bytes(plan.moved_bytes || plan.bytes)}` });
    for (const one of plan.bars) {
      lane.bars.push({ begin: one.begun_at, end: one.committed_at ?? one.staged_at, kind: 'step', thin: true, text: `${plan.plan}, handover ${one.number + 1}: ${bytes(one.bytes)}${one.committed_at ? `, in force at ${time(one.committed_at)}` : ', not committed'}` });
    }
    if (plan.verdict && plan.verdict_at) lane.marks.push({ at: plan.verdict_at, kind: plan.verdict, letter: LETTERS[plan.verdict] ?? '•', text: `${plan.plan}: ${plan.verdict}. ${plan.verdict_reason}` });
  }
  return [...byEngine.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
}

/** A dialog that asks before the loop is paused or resumed. */
function confirmation(api, announce) {
  const heading = h('h2', { id: 'ask-title' });
  const about = h('p');
  const reason = h('input', { id: 'reason', type: 'text', maxlength: '500', autocomplete: 'off' });
  const reasonLine = h('p', { class: 'field' }, h('label', { for: 'reason' }, 'Reason, shown to everyone who looks'), reason);
  const failure = h('p', { class: 'error', role: 'alert' });
  const confirm = h('button', { type: 'submit', class: 'primary' });
  const cancel = h('button', { type: 'button', onclick: () => dialog.close() }, 'Cancel');
  const form = h('form', { method: 'dialog' }, heading, about, reasonLine, failure, h('div', { class: 'buttons' }, cancel, confirm));
  const dialog = h('dialog', { 'aria-labelledby': 'ask-title' }, form);
  let pausing = true;
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    confirm.disabled = true;
    setText(failure, '');
    try {
      const state = await api('/v1/loop/pause', { method: 'POST', body: JSON.stringify(pausing ? { paused: true, reason: reason.value.trim() } : { paused: false }) });
      announce(state.paused ? 'The loop is paused.' : 'The loop is resumed.');
      dialog.close();
    } catch (error) {
      setText(failure, error.message);
    } finally {
      confirm.disabled = false;
    }
  });
  return {
    dialog,
    open(loop) {
      pausing = !loop.paused;
      setText(heading, pausing ? 'Pause automatic planning?' : 'Resume automatic planning?');
      setText(about, pausing ? PAUSED : RESUMED);
      setText(confirm, pausing ? 'Pause the loop' : 'Resume the loop');
      setText(failure, '');
      reason.value = '';
      reasonLine.hidden = !pausing;
      dialog.showModal();
    },
  };
}

/** Build the page. */
export function mount(root, { api, announce }) {
  let picture = null;
  const verdict = h('p', { class: 'verdict' });
  const asking = confirmation(api, announce);
  const act = h('button', { type: 'button', hidden: true, onclick: () => asking.open(picture.loop) });
  const limits = h('p', { class: 'about' });
  const span = h('select', { id: 'span' }, SPANS.map(([value, name]) => h('option', { value: String(value) }, name)));
  const chart = h('section', { 'aria-label': 'Timeline' }, h('div', { class: 'bar-of-section' }, h('h2', {}, 'Timeline'), h('label', { for: 'span' }, 'Last'), span));
  const engines = h('section', { 'aria-label': 'Engines' }, h('h2', {}, 'Engines'));
  const plans = h('section', { 'aria-label': 'Plans' }, h('h2', {}, 'Plans'));
  root.append(h('h1', {}, title),
    h('section', { 'aria-label': 'State' }, h('div', { class: 'verdict-line' }, verdict, act), limits), chart, plans, engines, asking.dialog);
  const timeline = new Timeline(chart, {
    title: 'Plans, handovers and verdicts', empty: 'No plan in this time.',
    about: 'Bars: plans, with their handovers below. Blue: the planner, grey: an operator, purple: a rollback, red: aborted. ✓ kept, ✕ harmful, ? unknown.',
  });
  const engineTable = new Table(engines, { caption: 'What the planner knows and decided', columns: engineColumns(() => picture.loop ?? { budget_bytes: 0 }), key: (row) => row.engine, empty: 'The planner knows no engine.' });
  const planTable = new Table(plans, { caption: 'Plans, newest first', columns: PLANS, key: (row) => `${row.engine} ${row.plan}`, detail: details, empty: 'No plan was carried out.', most: 20 });

  function drawTimeline() {
    if (!picture) return;
    const now = Date.now() / 1000;
    const begin = now - Number(span.value);
    timeline.update(lanes(picture.plans, begin, now), begin, now);
  }

  span.addEventListener('change', drawTimeline);
  const ticking = setInterval(drawTimeline, 2000);

  return {
    update(_, data) {
      const before = picture?.loop?.paused;
      picture = data;
      const [kind, sentence] = judged(data);
      verdict.className = `verdict ${kind}`;
      setText(verdict, sentence);
      act.hidden = !data.loop;
      if (data.loop) {
        setText(act, data.loop.paused ? 'Resume…' : 'Pause…');
        setText(limits, `Automatic plans may copy ${bytes(data.loop.budget_bytes)} per engine in ${duration(data.loop.budget_seconds)}.`);
        if (before !== undefined && before !== data.loop.paused) announce(sentence);
      }
      engineTable.update(data.engines);
      planTable.update(data.plans);
      drawTimeline();
    },
    close() {
      clearInterval(ticking);
      timeline.close();
    },
  };
}
