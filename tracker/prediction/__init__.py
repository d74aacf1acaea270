"""Tables that predict the experts of a request, learnt from reports of requests that ended. Pure."""
