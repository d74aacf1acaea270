"""Messages that state a fact: published for all subscribers, some of them stored."""
