"""Tables that predict a request's experts, learnt from reports of finished requests. Pure."""
