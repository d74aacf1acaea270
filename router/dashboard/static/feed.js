// Reads server-sent events by fetch, because an EventSource cannot send an Authorization header.

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 10000;

export class Feed {
  /**
   * handlers: event(topic, data), opened(), lost(reason, milliseconds until the next attempt), and
   * refused(status, message) for answers that another attempt cannot change.
   */
  constructor(topics, headers, handlers) {
    this.url = new URL(`../feed?topics=${topics.join(',')}`, import.meta.url);
    this.headers = headers;
    this.handlers = handlers;
    this.abort = new AbortController();
    this.pause = FIRST_PAUSE;
    this.run();
  }

  close() {
    this.abort.abort();
  }

  async run() {
    while (!this.abort.signal.aborted) {
      const reason = await this.once();
      if (this.abort.signal.aborted || reason === null) return;
      const wait = this.pause * (0.75 + 0.5 * Math.random()); // so that pages do not all return together
      this.handlers.lost(reason, wait);
      await new Promise((resolve) => { setTimeout(resolve, wait); });
      this.pause = Math.min(2 * this.pause, LONGEST_PAUSE);
    }
  }

  /** Read one connection to its end. Return the reason why it ended; null: do not connect again. */
  async once() {
    try {
      const answer = await fetch(this.url, { headers: this.headers(), signal: this.abort.signal, cache: 'no-store' });
      if (!answer.ok) return await this.refusal(answer);
      this.handlers.opened();
      return await this.read(answer.body.getReader());
    } catch (error) {
      return this.abort.signal.aborted ? null : `no connection (${error.message})`;
    }
  }

  async refusal(answer) {
    const message = await errorOf(answer);
    if (answer.status === 401 || answer.status === 403 || answer.status === 400) {
      this.handlers.refused(answer.status, message);
      return null;
    }
    return message;
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = '';
    let reason = 'the connection ended';
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return reason;
      this.pause = FIRST_PAUSE;
      const blocks = (rest + decoder.decode(value, { stream: true })).split('\n\n');
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event === null) continue;
        if (event.name === 'end') reason = event.data.reason;
        else this.handlers.event(event.name, event.data);
      }
    }
  }
}

/** Return the name and data of one event; null for a comment. */
export function parse(block) {
  let name = null;
  let data = '';
  for (const line of block.split('\n')) {
    if (line.startsWith('event: ')) name = line.slice(7);
    else if (line.startsWith('data: ')) data += line.slice(6);
  }
  return name === null ? null : { name, data: JSON.parse(data) };
}

/** Return the message of an error answer. */
export async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the router answered ${answer.status}`;
  }
}
