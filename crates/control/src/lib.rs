//! What a node and a monitor say to each other over the control socket.
