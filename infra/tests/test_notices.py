"""Notices reach the SNS topic of AWS, here of moto, and a topic that refuses them harms nothing."""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from services.common.notices.channels import Topic
from services.common.notices.notice import Notice
from services.common.notices.notifier import Notifier

STALLED = Notice("stalled", "stalled/1", "trainer small-0123abcd", "rank 3: step 12 takes 900 s", report="/fsx/r.html")


def test_a_topic_gets_each_notice_once_and_a_missing_one_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        queues = boto3.client("sqs", region_name="us-west-2")
        url = queues.create_queue(QueueName="mail")["QueueUrl"]
        topics = boto3.client("sns", region_name="us-west-2")
        arn = topics.create_topic(Name="alerts")["TopicArn"]
        topics.subscribe(TopicArn=arn, Protocol="sqs", Endpoint="arn:aws:sqs:us-west-2:123456789012:mail")
        for topic in (f"{arn}-of-nobody", arn, arn):
            opened = Notifier(tmp_path / "notices.jsonl", [Topic(topic)])
            opened.raise_notice(STALLED)
            opened.close()

        [received] = queues.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]

    mail = json.loads(received["Body"])
    assert mail["Subject"] == "Millrace trainer small-0123abcd: stalled"
    assert "runbooks/stall.md" in mail["Message"]
    assert "AWS answered NotFound" in caplog.text
