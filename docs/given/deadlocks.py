from syncprims import PeerFailed
