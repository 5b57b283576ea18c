variable "prefix" {
  description = "Prefix of the repositories' names; the overlays in k8s/ have the same."
  type        = string
}

variable "images" {
  type = set(string)
}

variable "key_arn" {
  type = string
}

variable "keep_data" {
  description = "Whether Terraform refuses to destroy a repository with images."
  type        = bool
}

resource "aws_ecr_repository" "this" {
  for_each             = var.images
  name                 = "${var.prefix}/${each.value}"
  image_tag_mutability = "IMMUTABLE" # a tag in a manifest, a checkpoint or a rollback always means the same image
  force_delete         = !var.keep_data
  image_scanning_configuration {
    scan_on_push = true
  }
  encryption_configuration {
    encryption_type = "KMS"
    kms_key         = var.key_arn
  }
}

# No image with a tag expires, and every pushed image has one. ECR cannot know which images are still needed: a node that is
# replaced months into a run pulls its image by digest, and a rollback pulls one from the history on the file system. A rule by
# age or number would delete those first.
resource "aws_ecr_lifecycle_policy" "this" {
  for_each   = aws_ecr_repository.this
  repository = each.value.name
  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "Images whose tag somebody deleted, and layers of broken pushes"
      selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 14 }
      action       = { type = "expire" }
    }]
  })
}

output "repositories" {
  description = "Names of the repositories by image."
  value       = { for image, repository in aws_ecr_repository.this : image => repository.name }
}
