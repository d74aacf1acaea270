// Requests: recent decisions, and one of them opened with the price of every candidate.

import { copyButton, h, setText, show } from '../dom.js';
import { count, digits, milliseconds, percent, time } from '../format.js';
import { Table } from '../table.js';

export const title = 'Requests';
export const topics = ['decisions'];

const REASONS = {
  cheapest: 'It had the lowest score.',
  tie: 'Several candidates shared the lowest score; the least outstanding work decided, then chance.',
  home: 'It is a home of such requests, and its saving covers its extra cost.',
  session: 'The conversation stays on its rank.',
  temperature: 'It was drawn, by the setting temperature_ms.',
  only: 'It was the only candidate.',
};
const TERMS = {
  prefill: 'computing the prompt tokens that are not cached there',
  queue: 'the work that is ahead of it there',
  decode: 'emitting its tokens beside the running requests',
  experts: 'reaching the ranks and nodes that hold its predicted experts',
  distinct: 'reading experts that no other request of a step needs',
  sharded: 'the collective operations of sharded layers',
  lockstep: 'the delay of all other ranks, which wait for the slowest of each step',
  handover: 'a migration in progress',
};
const SHOWN = 16; // candidates drawn before "show all"
const PAUSE = 2000; // milliseconds between two searches

/** Build the list, or one decision if the address names one. */
export function mount(root, context) {
  return context.args[0] ? one(root, context, context.args[0]) : list(root, context);
}

// The list

function list(root, { api, address, announce }) {
  const fields = { tenant: null, model: null, engine: null };
  const form = h('form', { class: 'filters', role: 'search', 'aria-label': 'Filter decisions' });
  for (const name of Object.keys(fields)) {
    const options = h('datalist', { id: `${name}-options` });
    const input = h('input', { id: `filter-${name}`, type: 'search', list: `${name}-options`, placeholder: 'any', autocomplete: 'off' });
    input.addEventListener('input', () => search(true));
    fields[name] = { input, options, seen: new Set() };
    form.append(h('div', {}, h('label', { for: input.id }, name[0].toUpperCase() + name.slice(1)), input, options));
  }
  form.addEventListener('submit', (event) => event.preventDefault());
  const hold = h('button', { type: 'button', 'aria-pressed': 'false' }, 'Hold');
  const about = h('p', { class: 'about', role: 'status' });
  const holder = h('section', { 'aria-label': 'Decisions' });
  root.append(h('h1', {}, title), h('div', { class: 'bar-of-section' }, form, hold), about, holder);
  const table = new Table(holder, {
    caption: 'Recent decisions of this router process, newest first',
    key: (row) => row.id,
    empty: 'No decision matches.',
    columns: [
      { title: 'Decision', value: (row, cell) => (cell.link ??= h('a', { href: address('requests', row.id), class: 'mono' }, row.id)) },
      { title: 'Time', value: (row) => time(row.at) },
      { title: 'Rank', value: (row) => `${row.engine}/${row.rank}` },
      { title: 'Why', value: (row) => row.why, about: 'cheapest: the lowest predicted cost; tie: several had it; home: the rank that is to hold the experts of such requests; session: the rank of the conversation; only: there was no other.' },
      { title: 'Model', value: (row) => row.model },
      { title: 'Tenant', value: (row) => row.tenant || '–' },
      { title: 'Prompt', unit: 'tokens', numeric: true, value: (row) => count(row.prompt_tokens) },
      { title: 'Cached', numeric: true, about: 'Share of the prompt whose KV the rank holds already.', value: (row) => percent(row.cached_tokens / row.prompt_tokens) },
      { title: 'Predicted cost', numeric: true, about: 'Milliseconds that the request adds there, for itself and for others. Open a decision for its terms.', value: (row) => milliseconds(row.score_ms) },
      { title: 'Next best', numeric: true, about: 'How much more the next rank would have cost.', value: (row) => (row.margin_ms === null ? '–' : `${row.margin_ms < 0 ? '−' : '+'}${milliseconds(Math.abs(row.margin_ms))}`) },
      { title: 'Candidates', numeric: true, value: (row) => count(row.candidates) },
      { title: 'Attempt', numeric: true, about: 'Above 1: an earlier attempt failed, with its cause.', value: (row) => (row.cause ? `${row.attempt} (${row.cause})` : String(row.attempt)) },
    ],
  });
  let newest = null;
  let waiting = null;
  let searched = 0;
  let held = false;

  hold.addEventListener('click', () => {
    held = !held;
    hold.setAttribute('aria-pressed', String(held));
    announce(held ? 'The list is held' : 'The list is live');
    if (!held) search(true);
  });

  const wanted = () => Object.entries(fields).map(([name, field]) => [name, field.input.value.trim()]).filter(([, value]) => value);

  function draw(found, filtered) {
    table.update(found.rows);
    setText(about, `${found.rows.length} ${filtered ? 'matching' : 'newest'} of ${count(found.kept)} decisions that can still be opened${held ? ', held' : ''}.`);
  }

  /** Show the newest, or ask the router for those of a tenant, model or engine, every PAUSE at most. */
  function search(now) {
    if (newest === null || (held && !now)) return;
    const filter = wanted();
    if (!filter.length) {
      draw(newest, false);
      return;
    }
    if (waiting !== null) return;
    waiting = setTimeout(async () => {
      searched = Date.now();
      try {
        const found = await api(`decisions?${new URLSearchParams(wanted())}`);
        draw(found, true);
      } catch (error) {
        setText(about, error.message);
      }
      waiting = null;
      if (String(wanted()) !== String(filter)) search(true);
    }, now ? 150 : Math.max(0, searched + PAUSE - Date.now()));
  }

  function note(rows) {
    for (const row of rows) {
      for (const [name, field] of Object.entries(fields)) {
        if (row[name] && !field.seen.has(row[name]) && field.seen.size < 200) {
          field.seen.add(row[name]);
          field.options.append(h('option', { value: row[name] }));
        }
      }
    }
  }

  return {
    update(_, data) {
      newest = data;
      note(data.rows);
      search(false);
    },
    close() {
      clearTimeout(waiting);
    },
  };
}

// One decision

function one(root, { api, address, announce }, id) {
  const holder = h('div', {}, h('p', { class: 'about' }, 'Reading…'));
  root.append(
    h('p', {}, h('a', { href: address('requests') }, '← All decisions')),
    h('h1', {}, 'Decision ', h('span', { class: 'mono' }, id)), holder);
  api(`decisions/${encodeURIComponent(id)}`).then(
    (record) => { if (root.contains(holder)) draw(holder, record, address, announce); },
    (error) => show(holder, h('p', { class: 'error', role: 'alert' }, error.message)));
  return { update() {} };
}

function draw(root, record, address, announce) {
  const terms = Object.keys(record.candidates[0].terms_ms).filter((term) => record.candidates.some((one) => one.terms_ms[term]));
  show(root,
    h('p', { class: 'verdict' }, `${record.chosen} was chosen. ${REASONS[record.why] ?? record.why} ${margin(record)}`),
    facts(record, address, announce),
    candidates(record, terms),
    otherwise(record),
    prediction(record),
    excluded(record));
}

function margin(record) {
  if (record.margin === null) return '';
  const amount = record.unit === 'ms' ? milliseconds(Math.abs(record.margin)) : digits(Math.abs(record.margin));
  return record.margin < 0 ? `${record.runner_up} would have cost ${amount} less.` : `${record.runner_up} would have cost ${amount} more.`;
}

function facts(record, address, announce) {
  const copied = (text, what) => [h('span', { class: 'mono' }, text), ' ', copyButton(text, what, announce)];
  const rows = [
    ['Request', record.request_id ? copied(record.request_id, 'request id') : '–'],
    ['Trace', record.trace_id ? copied(record.trace_id, 'trace id') : 'none: this router does not trace'],
    ['Model', record.model],
    ['Tenant', record.tenant ?? '–'],
    ['Prompt', `${count(record.prompt_tokens)} tokens`],
    ['Expected output', `${count(record.expected_output_tokens)} tokens`],
    ['Policy', record.policy],
    ['KV reuse', { common: 'with all requests', tenant: 'within the tenant', shared: 'the engine does not isolate tenants' }[record.cache]],
    ['Session’s rank', record.session_rank ?? '–'],
    ['Home ranks', record.home_ranks.length ? record.home_ranks.join(', ') : record.homes_note ?? '–'],
    ['Attempt', record.replaces ? [`${record.attempt}, after ${record.cause} of `, h('a', { href: address('requests', record.replaces) }, record.replaces)] : String(record.attempt)],
  ];
  return h('dl', { class: 'facts' }, rows.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
}

function candidates(record, terms) {
  const cost = (one) => terms.reduce((total, term) => total + Math.max(0, one.terms_ms[term] ?? 0), 0);
  const most = Math.max(...record.candidates.map(cost), 1e-9);
  const section = h('section', { 'aria-label': 'Candidates' },
    h('div', { class: 'bar-of-section' }, h('h2', {}, `Candidates (${record.candidates.length})`)),
    terms.length < Object.keys(record.candidates[0].terms_ms).length && record.unit !== 'ms'
      ? h('p', { class: 'about' }, 'The speed of some ranks is neither stated nor measured yet: their terms are left out, and the score is a comparison, not a time.') : null,
    h('p', { class: 'legend', 'aria-hidden': 'true' }, terms.map((term) => [h('span', { class: `key key-${number(record, term)}` }), h('span', { class: 'value' }, term)])));
  const bars = new Map();
  const bar = (one) => {
    const segments = h('div', { class: 'stack', 'aria-hidden': 'true' }, terms.filter((term) => one.terms_ms[term] > 0).map((term) => {
      const segment = h('span', { class: `key-${number(record, term)}`, title: `${term}: ${milliseconds(one.terms_ms[term])}` });
      segment.style.width = `${100 * one.terms_ms[term] / most}%`;
      return segment;
    }));
    return segments;
  };
  const table = new Table(section, {
    caption: record.unit === 'ms' ? 'Predicted added milliseconds of each candidate, by term; the lowest score first' : 'Scores of each candidate, the lowest first; terms in milliseconds where a speed is known',
    key: (one) => `${one.engine}/${one.rank}`,
    most: SHOWN,
    columns: [
      { title: 'Candidate', value: (one) => `${one.engine}/${one.rank}${`${one.engine}/${one.rank}` === record.chosen ? ' ✓' : ''}`, class: (one) => (`${one.engine}/${one.rank}` === record.chosen ? 'chosen' : '') },
      { title: 'Terms', value: (one) => { if (!bars.has(one)) bars.set(one, bar(one)); return bars.get(one); } },
      { title: 'Score', unit: record.unit === 'ms' ? 'ms' : '', numeric: true, value: (one) => digits(one.score) },
      ...terms.map((term) => ({ title: term, unit: 'ms', numeric: true, about: `${TERMS[term] ?? 'a term of the cost'}; – where no speed is known.`, value: (one) => (one.terms_ms[term] === null ? '–' : digits(one.terms_ms[term])) })),
      { title: 'Cached blocks', numeric: true, about: 'KV blocks of the prompt that the rank holds; ≈ where they are estimated.', value: (one) => `${one.overlap_approximate ? '≈' : ''}${count(one.overlap_blocks)}` },
      { title: 'Requests there', numeric: true, value: (one) => count(one.load.requests) },
      { title: 'Local experts', numeric: true, about: 'Share of the predicted expert activations that the rank serves itself.', value: (one) => percent(one.local_share) },
      { title: 'Speed', about: 'Whether the speed behind the terms is stated by the engine, measured, or unknown.', value: (one) => one.speed },
    ],
  });
  table.update(record.candidates);
  return section;
}

/** Number of a term's colour, the same in every decision. */
function number(record, term) {
  return (Object.keys(record.candidates[0].terms_ms).indexOf(term) % 8) + 1;
}

function otherwise(record) {
  const rows = [
    ...Object.entries(record.without).map(([term, rank]) => [`Without the term ${term}`, rank]),
    ['Without the chosen rank', record.if_gone ?? 'no other candidate'],
  ];
  const section = h('section', { 'aria-label': 'What would have been chosen' }, h('h2', {}, 'What would have been chosen'));
  new Table(section, {
    caption: 'The choice under other assumptions', key: ([name]) => name,
    columns: [
      { title: 'Assumption', value: ([name]) => name },
      { title: 'Choice', value: ([, rank]) => (rank === record.chosen ? `${rank} (the same)` : rank) },
    ],
  }).update(rows);
  return section;
}

function prediction(record) {
  const found = record.prediction;
  if (!found) return null;
  return h('section', { 'aria-label': 'Predicted experts' }, h('h2', {}, 'Predicted experts'),
    h('p', {}, `Best source: ${found.best}; confidence ${percent(found.confidence)}, gain ${digits(found.gain)}. Heaviest clusters: ${found.clusters.map((one) => `${one.cluster} (${percent(one.weight)})`).join(', ') || 'none'}.`));
}

function excluded(record) {
  const rows = [
    ...record.excluded.map((one) => ({ ...one, how: 'excluded' })),
    ...record.ignored.map((one) => ({ ...one, how: 'exclusion ignored: no other rank was left' })),
  ];
  if (!rows.length) return null;
  const section = h('section', { 'aria-label': 'Not considered' }, h('h2', {}, 'Not considered'));
  new Table(section, {
    caption: 'Ranks that were excluded, with the reason', key: (one) => `${one.engine}/${one.rank} ${one.how}`, most: 32,
    columns: [
      { title: 'Rank', value: (one) => `${one.engine}/${one.rank}` },
      { title: 'How', value: (one) => one.how },
      { title: 'Reason', value: (one) => one.reason },
    ],
  }).update(rows);
  return section;
}
